"""Attention sinks: a last key and a last value of zeros, whose score is the last column of the mask.

K ─ Concat ─┐                        Where(what a row sees, 0, -inf) ─ Expand ┐
zeros ┘     ├ Attention ─            sinks [1, heads, 1, 1] ──────── Expand ─ Concat: the mask
V ─ Concat ─┘
"""

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.attention_pattern import is_distance, read_window
from ingot.builder.graph import Graph, is_op, is_weight, producer, scalar, small_ints, weight_shape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sinks:
    """window: of the attention, 0 for none. weight: [1, heads, 1, 1]"""

    window: int
    weight: gs.Tensor


def without_sink(tensor: gs.Tensor) -> gs.Tensor:
    """Keys or values without the zeros at their end, if they have them."""
    node = producer(tensor)
    if node is None or not is_op(node, "Concat") or node.attrs.get("axis") != 2 or len(node.inputs) != 2:
        return tensor
    return node.inputs[0] if _is_one_zero(node.inputs[1]) else tensor


def read_sinks(graph: Graph, attention: gs.Node) -> Sinks | str:
    """The sinks of an attention that is not causal by itself, or why it has none."""
    k, v, mask = attention.inputs[1:4]
    if without_sink(k) is k or without_sink(v) is v:
        return "the attention is not causal"
    node = producer(mask)
    if node is None or not is_op(node, "Concat") or node.attrs.get("axis") != 3 or len(node.inputs) != 2:
        return "the mask has no column for the sinks"
    seen, column = (producer(each) for each in node.inputs)
    if seen is None or column is None or not is_op(seen, "Expand") or not is_op(column, "Expand"):
        return "the mask has no column for the sinks"
    heads = column.inputs[0]
    if (
        not is_weight(heads)
        or len(weight_shape(heads)) != 4
        or weight_shape(heads) != (1, weight_shape(heads)[1], 1, 1)
    ):
        return "the sinks are not one number for each head"
    window = _read_seen(graph, seen.inputs[0])
    if isinstance(window, str):
        return window
    return Sinks(window=window, weight=heads)


def _read_seen(graph: Graph, tensor: gs.Tensor) -> int | str:
    """The window of a mask that is 0 where a row sees a column, else minus infinity; 0 where it sees all before it."""
    wrong = "the attention takes a mask that is not a sliding window"
    where = producer(tensor)
    if where is None or not is_op(where, "Where"):
        return wrong
    if (scalar(where.inputs[1]), scalar(where.inputs[2])) != (0.0, -np.inf):
        return wrong
    seen = producer(where.inputs[0])
    conditions = seen.inputs if seen is not None and is_op(seen, "And") else [where.inputs[0]]
    causal = [each for each in conditions if _is_causal(graph, each)]
    others = [each for each in conditions if each not in causal]
    if len(causal) != 1 or len(others) != len(conditions) - 1:
        return wrong
    return read_window(graph, others[0]) if others else 0


def _is_causal(graph: Graph, tensor: gs.Tensor) -> bool:
    node = producer(tensor)
    if node is None or not is_op(node, "GreaterOrEqual"):
        return False
    return is_distance(graph, node.inputs[0]) and scalar(node.inputs[1]) == 0


def _is_one_zero(tensor: gs.Tensor) -> bool:
    """Whether a tensor holds zeros of one more token, [batch, heads, 1, head_dim]."""
    node = producer(tensor)
    shape = producer(node.inputs[0]) if node is not None and is_op(node, "ConstantOfShape") else None
    if node is None or shape is None or not is_op(shape, "Concat") or len(shape.inputs) != 2:
        return False
    value, rest = node.attrs.get("value"), small_ints(shape.inputs[1])
    return rest is not None and len(rest) == 3 and rest[1] == 1 and (value is None or not np.any(value.values))
