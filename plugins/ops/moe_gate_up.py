"""The first half of the experts: for each slot of each row, the gated product with the weight of its expert."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.attributes import PRODUCT_RULES, one_of
from ingot.plugins.op import Array, Call, Op, Shapes
from ingot.plugins.work import experts_work


def reference(call: Call) -> tuple[Array, ...]:
    """p = x[r] @ weight[ids[r, slot]].T; y[r, slot] = activation(p[:I]) * p[I:]

    activations round x, as in the op matmul.
    """
    x, ids, weight = call.required(0), call.required(1), call.weight(2)
    half = weight.shape[1] // 2
    y = np.zeros((*ids.shape, half), np.float32)
    activate, places = ACTIVATIONS[str(call.attrs["activation"])], each_expert(ids)
    parts = [(expert, x[rows]) for expert, (rows, _) in places.items()]
    for place, p in zip(places.values(), weight.products(parts, str(call.attrs["activations"])), strict=True):
        y[place] = activate(p[:, :half]) * p[:, half:]
    return (y.reshape(len(ids), -1),)


def each_expert(ids: Array) -> dict[int, tuple[npt.NDArray[np.intp], ...]]:
    """The experts that ids [rows, slots] name, ascending → (rows, slots) that take it."""
    numbers = ids.astype(np.int64)
    return {int(expert): np.nonzero(numbers == expert) for expert in np.unique(numbers)}


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Input and weight must agree on K; the weight has as many rows for gates as for ups."""
    (k,), (slots,), weight = shapes[0] or (0,), shapes[1] or (0,), shapes[2] or ()
    if len(weight) != 3 or weight[2] != k or weight[1] % 2:
        return f"an input of {k} columns cannot be multiplied with the gates and ups of experts {weight}"
    return too_many(slots, weight[0])


def too_many(slots: int, experts: int) -> str | None:
    """What is wrong with rows that take so many experts."""
    return None if slots <= experts else f"a row cannot take {slots} of {experts} experts"


OP = Op(
    name="moe_gate_up",
    inputs=("x", "ids", "weight"),  # [rows, K], [rows, slots], [experts, 2 I, K] packed: gate rows, then up rows
    outputs=("y",),  # [rows, slots * I]
    attrs={"activation": str, "activations": "f32", "group": 0},
    out_cols=lambda cols, attrs: ((cols[1] or 0) * ((cols[2] or 0) // 2),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={**PRODUCT_RULES, "activation": one_of(*ACTIVATIONS)},
    work=experts_work,
    packed=2,
    gated=lambda attrs: True,
    experts=True,
)
