"""The first half of the experts: for each slot of each row, the gated product with the weight of its expert."""

import numpy as np

from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.op import Array, Call, Op
from ingot.plugins.ops.matmul import expert_of, product


def reference(call: Call) -> tuple[Array, ...]:
    """p = x[r] @ weight[ids[r, slot]].T; y[r, slot] = activation(p[:I]) * p[I:]

    activations round x, as of the op matmul.
    """
    x, ids, weight = call.required(0), call.required(1).astype(np.int64), call.weight(2)
    half = weight.shape[1] // 2
    y = np.zeros((*ids.shape, half), np.float32)
    for expert in np.unique(ids):
        rows, slots = np.nonzero(ids == expert)
        p = product(x[rows], expert_of(weight, int(expert)), str(call.attrs["activations"]))
        y[rows, slots] = ACTIVATIONS[str(call.attrs["activation"])](p[:, :half]) * p[:, half:]
    return (y.reshape(len(ids), -1),)


OP = Op(
    name="moe_gate_up",
    inputs=("x", "ids", "weight"),  # [rows, K], [rows, slots], [experts, 2 I, K] packed: gate rows, then up rows
    outputs=("y",),  # [rows, slots * I]
    attrs={"activation": str, "activations": "f32", "group": 0},
    out_cols=lambda cols, attrs: ((cols[1] or 0) * ((cols[2] or 0) // 2),),
    reference=reference,
)
