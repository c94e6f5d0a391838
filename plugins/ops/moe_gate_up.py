"""The first half of the experts: for each slot of each row, the gated product with the weight of its expert."""

import numpy as np

from ingot.dtypes import round_to_bf16
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """p = x[r] @ weight[ids[r, slot]].T; y[r, slot] = activation(p[:I]) * p[I:]

    activations "bf16" rounds x to bf16 before the product (what AMX tiles take); sums are float32 or wider.
    """
    x, ids, weight = call.required(0), call.required(1).astype(np.int64), call.required(2)
    x = round_to_bf16(x) if call.attrs["activations"] == "bf16" else x
    half = weight.shape[1] // 2
    y = np.zeros((*ids.shape, half), np.float32)
    for expert in np.unique(ids):
        rows, slots = np.nonzero(ids == expert)
        product = (x[rows].astype(np.float64) @ weight[expert].astype(np.float64).T).astype(np.float32)
        y[rows, slots] = ACTIVATIONS[str(call.attrs["activation"])](product[:, :half]) * product[:, half:]
    return (y.reshape(len(ids), -1),)


OP = Op(
    name="moe_gate_up",
    inputs=("x", "ids", "weight"),  # [rows, K], [rows, slots], [experts, 2 I, K] packed: gate rows, then up rows
    outputs=("y",),  # [rows, slots * I]
    attrs={"activation": str, "activations": "f32"},
    out_cols=lambda cols, attrs: ((cols[1] or 0) * ((cols[2] or 0) // 2),),
    reference=reference,
)
