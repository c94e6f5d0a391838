"""Product with a packed weight and its epilogue: bias, activation, gate, residual."""

import numpy as np

from ingot.dtypes import round_to_bf16
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """p = x @ weight.T + bias; gated: y = activation(p[:, :I]) * p[:, I:], else y = activation(p); then + residual

    activations "bf16" or "f16" rounds x to that type before the product (what AMX tiles and GPUs take); sums are
    float32 or wider.
    """
    x, weight, bias, residual = call.required(0), call.required(1), call.inputs[2], call.inputs[3]
    if call.attrs["activations"] == "bf16":
        x = round_to_bf16(x)
    elif call.attrs["activations"] == "f16":
        x = x.astype(np.float16).astype(np.float32)
    product = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)
    if bias is not None:
        product = product + bias
    activate = ACTIVATIONS[str(call.attrs["activation"])]
    if call.attrs["gated"]:
        half = product.shape[1] // 2
        y = activate(product[:, :half]) * product[:, half:]
    else:
        y = activate(product)
    return (y if residual is None else y + residual,)


OP = Op(
    name="matmul",
    inputs=("x", "weight", "bias?", "residual?"),  # [rows, K], [N, K] packed, [N], [rows, out]
    outputs=("y",),  # [rows, out], out = N / 2 if gated else N; y may be the residual's buffer (in place)
    attrs={"activation": "none", "gated": 0, "activations": "f32"},
    out_cols=lambda cols, attrs: ((cols[1] or 0) // (2 if attrs["gated"] else 1),),
    reference=reference,
    in_place=((0, 3),),
)
