"""The first half of the experts: for each slot of each row, the gated product with the weight of its expert."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS, sigmoid
from ingot.plugins.attributes import PRODUCT_RULES, not_negative, one_of
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.work import experts_work


def reference(call: Call) -> tuple[Array, ...]:
    """p = x[r] @ weight[ids[r, slot]].T + bias[ids[r, slot]]; y[r, slot] = activation(p[:I]) * p[I:]

    limit above 0: y = g * sigmoid(alpha * g) * (u + 1) instead, where g = min(p[:I], limit) and u = p[I:] within -limit
    and limit, as gpt-oss has it. activations round x, as in the op matmul.
    """
    x, ids, weight = call.required(0), call.required(1), call.weight(2)
    half = weight.shape[1] // 2
    y = np.zeros((*ids.shape, half), np.float32)
    places, bias = each_expert(ids), biases(call, 3, weight.shape)
    parts = [(expert, x[rows]) for expert, (rows, _) in places.items()]
    products = weight.products(parts, str(call.attrs["activations"]))
    for (expert, place), p in zip(places.items(), products, strict=True):
        p = p + bias[expert]
        y[place] = gated(p[:, :half], p[:, half:], call.attrs)
    return (y.reshape(len(ids), -1),)


def gated(gate: Array, up: Array, attrs: Mapping[str, Attr]) -> Array:
    """What an expert makes of its gate and up."""
    limit, alpha = np.float32(attrs["limit"]), np.float32(attrs["alpha"])
    if not limit:
        return ACTIVATIONS[str(attrs["activation"])](gate) * up
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
    """Input and weight must agree on K; the weight has as many rows for gates as for ups."""
    (k,), (slots,), weight = shapes[0] or (0,), shapes[1] or (0,), shapes[2] or ()
    if len(weight) != 3 or weight[2] != k or weight[1] % 2:
        return f"an input of {k} columns cannot be multiplied with the gates and ups of experts {weight}"
    if attrs["limit"] and attrs["activation"] != "silu":
        return f"a clamped gate is none of {attrs['activation']}"
    return unequal("bias", shapes[3], weight[0] * weight[1]) or too_many(slots, weight[0])


def too_many(slots: int, experts: int) -> str | None:
    """What is wrong with rows that take so many experts."""
    return None if slots <= experts else f"a row cannot take {slots} of {experts} experts"


OP = Op(
    name="moe_gate_up",
    # [rows, K], [rows, slots], [experts, 2 I, K] packed: gate rows, then up rows, [experts * 2 I]
    inputs=("x", "ids", "weight", "bias?"),
    outputs=("y",),  # [rows, slots * I]
    attrs={"activation": str, "limit": 0.0, "alpha": 1.0, "activations": "f32", "group": 0},
    out_cols=lambda cols, attrs: ((cols[1] or 0) * ((cols[2] or 0) // 2),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={**PRODUCT_RULES, "activation": one_of(*ACTIVATIONS), "limit": not_negative, "alpha": not_negative},
    work=experts_work,
    packed=2,
    vectors=(3,),
    gated=lambda attrs: True,
    experts=True,
)
