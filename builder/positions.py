"""Recognises token positions: Range(0, sequence length), clipped by Min, cast and given more dimensions."""

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.graph import Graph, is_op, producer, scalar, small_ints

_RESHAPING = frozenset({"Cast", "Unsqueeze", "Squeeze", "Expand", "Reshape", "Identity"})
UNLIMITED = int(np.iinfo(np.int32).max)


def position_count(graph: Graph, tensor: gs.Tensor) -> int | None:
    """How many positions `tensor` may hold (UNLIMITED without a Min); None if it holds no positions."""
    limit = UNLIMITED
    while (node := producer(tensor)) is not None:
        if node.op in _RESHAPING:
            tensor = node.inputs[0]
        elif is_op(node, "Min") and len(node.inputs) == 2:
            numbers = [scalar(each) for each in node.inputs]
            constant = next((number for number in numbers if number is not None), None)
            if constant is None:
                return None
            limit = min(limit, int(constant) + 1)
            tensor = node.inputs[0 if numbers[0] is None else 1]
        elif is_op(node, "Range"):
            start, end, step = node.inputs
            starts_at_zero = (scalar(start) == 0 or _is_zero_or_error(start)) and scalar(step) == 1
            return limit if starts_at_zero and _is_sequence_length(graph, end) else None
        else:
            return None
    return None


def _is_zero_or_error(tensor: gs.Tensor) -> bool:
    """Whether `tensor` is an element of a vector whose only one is 0: by that a graph fails for too many tokens."""
    node = producer(tensor)
    return node is not None and is_op(node, "Gather") and small_ints(node.inputs[0]) == [0]


def _is_sequence_length(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether `tensor` is the second dimension of the token ids."""
    index: int | None = None
    while (node := producer(tensor)) is not None:
        if is_op(node, "Gather") or is_op(node, "Slice"):
            position = scalar(node.inputs[1])
            index = None if position is None else int(position)
        elif is_op(node, "Shape"):
            start = node.attrs.get("start", 0)
            return node.inputs[0] is graph.ids and start + (index or 0) in (1, -1)
        elif node.op not in _RESHAPING:
            return False
        tensor = node.inputs[0]
    return False
