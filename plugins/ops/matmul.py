"""Product with a packed weight and its epilogue: bias, activation, gate, residual."""

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, from_float32, to_float32
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.op import Array, Call, Op
from ingot.plugins.quantised import Int8, QuantisedRows, round_to_int8

EXACT_K = 1024  # 127 * 127 * 1024 < 2^24


def reference(call: Call) -> tuple[Array, ...]:
    """y = epilogue(x @ weight.T)"""
    return (epilogue(call, product(call.required(0), call.weight(1), str(call.attrs["activations"]))),)


def epilogue(call: Call, p: Array) -> Array:
    """p + bias; gated: y = activation(p[:, :I]) * p[:, I:], else y = activation(p); then + residual"""
    bias, residual = call.optional(2), call.optional(3)
    if bias is not None:
        p = p + bias
    activate = ACTIVATIONS[str(call.attrs["activation"])]
    if call.attrs["gated"]:
        half = p.shape[1] // 2
        y = activate(p[:, :half]) * p[:, half:]
    else:
        y = activate(p)
    return y if residual is None else y + residual


def product(x: Array, weight: Array | QuantisedRows, activations: str) -> Array:
    """x @ weight.T, float32 [rows, N].

    activations  f32: x as it is; bf16, f16: x rounded to that first (what AMX tiles and GPUs take); sums are float32
                 or wider, and of a quantised weight they run over x * q and are multiplied by the row's scale at the
                 end.
                 int8: x rounded per row (`round_to_int8`); of q * a the int32 sum is exact, so that every order of
                 additions gives the same bits: p = float32(sum) * (a_scale * scale), both products in float32
    """
    if activations in ("bf16", "f16"):
        dtype = DType(activations)
        x = to_float32(from_float32(x, dtype), dtype)
    if isinstance(weight, np.ndarray):
        return (x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)
    if activations == "int8":
        codes, a_scale = round_to_int8(x)
        return _integer_product(codes, weight.integers).astype(np.float32) * (a_scale[:, None] * weight.scale)
    return (x.astype(np.float64) @ weight.integers.astype(np.float64).T).astype(np.float32) * weight.scale


def _integer_product(a: Int8, q: Int8) -> npt.NDArray[np.float64]:
    """a @ q.T, exact: float32 holds every sum of EXACT_K products of signed bytes, float64 every sum of those."""
    total = np.zeros((len(a), len(q)))
    for k in range(0, a.shape[1], EXACT_K):
        part = np.s_[:, k : k + EXACT_K]
        total += a[part].astype(np.float32) @ q[part].astype(np.float32).T
    return total


def expert_of(weight: Array | QuantisedRows, expert: int) -> Array | QuantisedRows:
    """[N, K] of one expert of a weight [experts, N, K]."""
    return weight[expert] if isinstance(weight, np.ndarray) else weight.take(expert)


OP = Op(
    name="matmul",
    inputs=("x", "weight", "bias?", "residual?"),  # [rows, K], [N, K] packed, [N], [rows, out]
    outputs=("y",),  # [rows, out], out = N / 2 if gated else N; y may be the residual's buffer (in place)
    # group: columns that share a multiplier of a w4 weight, 0 for all other weights
    attrs={"activation": "none", "gated": 0, "activations": "f32", "group": 0},
    out_cols=lambda cols, attrs: ((cols[1] or 0) // (2 if attrs["gated"] else 1),),
    reference=reference,
    in_place=((0, 3),),
)
