"""The second half of the experts: the product of each slot with the weight of its expert, and their weighted sum."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import PRODUCT_RULES
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.ops.moe_gate_up import biases, each_expert, too_many
from ingot.plugins.ops.sort_by_expert import COLUMNS
from ingot.plugins.weight_values import Inputs
from ingot.plugins.work import experts_work


def reference(call: Call) -> tuple[Array, ...]:
    """y[r] = sum of weights[r, slot] * (x[r, slot] @ weight[ids[r, slot]].T + bias[ids[r, slot]]), added up in the
    order of the experts

    activations round the inputs of each slot, as in the op matmul.
    """
    return (results(call, call.required(0).reshape(call.required(1).size, call.weight(3).shape[2])),)


def results(call: Call, x: Inputs) -> Array:
    """y of the slots of all rows [rows * slots, K]; the other inputs are those of the call."""
    (ids, weights), weight = (call.required(index) for index in (1, 2)), call.weight(3)
    y = np.zeros((len(ids), weight.shape[1]), np.float32)
    places, bias = each_expert(ids), biases(call, 4, weight.shape)
    parts = [(expert, x[rows * ids.shape[1] + slots]) for expert, (rows, slots) in places.items()]
    products = weight.products(parts, str(call.attrs["activations"]))
    for (expert, (rows, slots)), p in zip(places.items(), products, strict=True):
        np.add.at(y, rows, weights[rows, slots, None] * (p + bias[expert]))
    return y


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """The input has K columns for every slot, and every slot has a weight."""
    (k,), (slots,), weight = shapes[0] or (0,), shapes[1] or (0,), shapes[3] or ()
    if len(weight) != 3 or weight[2] * slots != k:
        return f"an input of {slots} slots in {k} columns cannot be multiplied with experts {weight}"
    sizes = unequal("weights", shapes[2], slots) or unequal("bias", shapes[4], weight[0] * weight[1])
    return sizes or unequal("lists", shapes[5], COLUMNS * slots) or too_many(slots, weight[0])


OP = Op(
    name="moe_down",
    # [rows, slots * K], [rows, slots] twice, [experts, N, K] packed, [experts * N], of the op sort_by_expert
    inputs=("x", "ids", "weights", "weight", "bias?", "lists?"),
    outputs=("y",),  # [rows, N]
    attrs={"activations": "f32", "group": 0},
    out_cols=lambda cols, attrs: (cols[3] or 0,),
    reference=reference,
    size_problem=size_problem,
    attr_rules=PRODUCT_RULES,
    work=experts_work,
    packed=3,
    vectors=(4,),
    experts=True,
    listed=5,
)
