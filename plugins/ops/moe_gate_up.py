"""The first half of the experts: for each slot of each row, the product with the weight of its expert, activated."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS, sigmoid
from ingot.plugins.attributes import PRODUCT_RULES, is_flag, not_negative, one_of
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.ops.sort_by_expert import COLUMNS
from ingot.plugins.weight_values import Inputs
from ingot.plugins.work import experts_work


def reference(call: Call) -> tuple[Array, ...]:
    """p = x[r] @ weight[ids[r, slot]].T + bias[ids[r, slot]]; y[r, slot] = activation(p[:I]) * p[I:]

    gated 0: y[r, slot] = activation(p), whose weight has no rows for gates.
    limit above 0: y = g * sigmoid(alpha * g) * (u + 1) instead, where g = min(p[:I], limit) and u = p[I:] within -limit
    and limit, as gpt-oss has it. activations round x, as in the op matmul.
    """
    return (results(call, call.required(0)),)


def results(call: Call, x: Inputs) -> Array:
    """y of rows [rows, K]; the other inputs are those of the call."""
    ids, weight = call.required(1), call.weight(2)
    out = _columns(weight.shape[1], call.attrs)
    y = np.zeros((*ids.shape, out), np.float32)
    places, bias = each_expert(ids), biases(call, 3, weight.shape)
    parts = [(expert, x[rows]) for expert, (rows, _) in places.items()]
    products = weight.products(parts, str(call.attrs["activations"]))
    for (expert, place), p in zip(places.items(), products, strict=True):
        p = p + bias[expert]
        y[place] = gated(p[:, :out], p[:, out:], call.attrs) if call.attrs["gated"] else _activated(p, call.attrs)
    flat: Array = y.reshape(len(ids), -1)
    return flat


def _columns(rows: int, attrs: Mapping[str, Attr]) -> int:
    """Columns of one result, from the rows of one expert."""
    return rows // 2 if attrs["gated"] else rows


def _activated(x: Array, attrs: Mapping[str, Attr]) -> Array:
    return ACTIVATIONS[str(attrs["activation"])](x)


def gated(gate: Array, up: Array, attrs: Mapping[str, Attr]) -> Array:
    """What an expert makes of its gate and up."""
    limit, alpha = np.float32(attrs["limit"]), np.float32(attrs["alpha"])
    if not limit:
        return _activated(gate, attrs) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + np.float32(1))


def biases(call: Call, index: int, weight: tuple[int, ...]) -> Array:
    """Input `index` by expert, [experts, N]; zeros where it is absent."""
    bias = call.optional(index)
    return np.zeros(weight[:2], np.float32) if bias is None else bias.reshape(weight[:2])


def each_expert(ids: Array) -> dict[int, tuple[npt.NDArray[np.intp], ...]]:
    """The experts that ids [rows, slots] name, ascending → (rows, slots) that take it."""
    numbers = ids.astype(np.int64)
    return {int(expert): np.nonzero(numbers == expert) for expert in np.unique(numbers)}


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Input and weight must agree on K; a gated weight has as many rows for gates as for ups."""
    (k,), (slots,), weight = shapes[0] or (0,), shapes[1] or (0,), shapes[2] or ()
    if len(weight) != 3 or weight[2] != k or (attrs["gated"] and weight[1] % 2):
        return f"an input of {k} columns cannot be multiplied with the gates and ups of experts {weight}"
    if attrs["limit"] and (attrs["activation"] != "silu" or not attrs["gated"]):
        return f"a clamped gate is none of {attrs['activation']}"
    sizes = unequal("bias", shapes[3], weight[0] * weight[1]) or unequal("lists", shapes[4], COLUMNS * slots)
    return sizes or too_many(slots, weight[0])


def too_many(slots: int, experts: int) -> str | None:
    """What is wrong with rows that take so many experts."""
    return None if slots <= experts else f"a row cannot take {slots} of {experts} experts"


OP = Op(
    name="moe_gate_up",
    # [rows, K], [rows, slots], [experts, N, K] packed: N = 2 I, gate rows, then up rows, or I, [experts * N], of the op
    # sort_by_expert
    inputs=("x", "ids", "weight", "bias?", "lists?"),
    outputs=("y",),  # [rows, slots * I]
    attrs={"activation": str, "gated": 1, "limit": 0.0, "alpha": 1.0, "activations": "f32", "group": 0},
    out_cols=lambda cols, attrs: ((cols[1] or 0) * _columns(cols[2] or 0, attrs),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={
        **PRODUCT_RULES,
        "activation": one_of(*ACTIVATIONS),
        "gated": is_flag,
        "limit": not_negative,
        "alpha": not_negative,
    },
    work=experts_work,
    packed=2,
    vectors=(3,),
    gated=lambda attrs: bool(attrs["gated"]),
    experts=True,
    listed=4,
)
