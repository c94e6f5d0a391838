"""The second half of the experts: the product of each slot with the weight of its expert, and their weighted sum."""

import numpy as np

from ingot.dtypes import round_to_bf16
from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """y[r] = sum of weights[r, slot] * (x[r, slot] @ weight[ids[r, slot]].T), added up in the order of the experts

    activations "bf16" rounds x to bf16 before the product (what AMX tiles take); sums are float32 or wider.
    """
    x, ids, weights, weight = (call.required(index) for index in range(4))
    x = round_to_bf16(x) if call.attrs["activations"] == "bf16" else x
    each = x.reshape(*ids.shape, weight.shape[2])
    y = np.zeros((len(ids), weight.shape[1]), np.float32)
    for expert in np.unique(ids).astype(np.int64):
        for slot in range(ids.shape[1]):
            rows = np.nonzero(ids[:, slot] == expert)[0]
            product = (each[rows, slot].astype(np.float64) @ weight[expert].astype(np.float64).T).astype(np.float32)
            y[rows] += weights[rows, slot, None] * product
    return (y,)


OP = Op(
    name="moe_down",
    inputs=("x", "ids", "weights", "weight"),  # [rows, slots * K], [rows, slots] twice, [experts, N, K] packed
    outputs=("y",),  # [rows, N]
    attrs={"activations": "f32"},
    out_cols=lambda cols, attrs: (cols[3] or 0,),
    reference=reference,
)
