"""Scores that fall with the distance (ALiBi): a mask of numbers.

distances ─ Cast ─ Mul -slopes [heads, 1, 1]
tokens ─ rounded ─ Mul slopes ─ rounded ─ Mul scale ─ Expand      rounded: to bf16, and back to float32
"""

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from ingot.builder.attention_pattern import is_distance
from ingot.builder.graph import Graph, is_op, producer, scalar, small_ints, weight_shape
from ingot.builder.positions import UNLIMITED, position_count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alibi:
    """slopes: [heads]. bf16: slopes times tokens are rounded, and scaled as scores are."""

    slopes: np.ndarray
    bf16: bool


def read_alibi(graph: Graph, attention: gs.Node, scale: float) -> Alibi | None:
    """What the mask of an attention adds to its scores; None where it is something else. scale: of its scores"""
    node = producer(attention.inputs[3])
    if node is None:
        return None
    if is_op(node, "Expand"):
        return _read_rounded(graph, node, scale)
    apart = _times_slopes(node)
    cast = None if apart is None else producer(apart[0])
    if apart is None or cast is None or not is_op(cast, "Cast") or not is_distance(graph, cast.inputs[0]):
        return None
    return Alibi(slopes=-apart[1], bf16=False)


def _read_rounded(graph: Graph, expand: gs.Node, scale: float) -> Alibi | None:
    scaled = producer(expand.inputs[0])
    if scaled is None or not is_op(scaled, "Mul") or scalar(scaled.inputs[1]) != np.float32(scale):
        return None
    product = producer(_unrounded(scaled.inputs[0]))
    parts = None if product is None else _times_slopes(product)
    tokens = None if parts is None else producer(_unrounded(parts[0]))
    if parts is None or tokens is None or not is_op(tokens, "Unsqueeze") or small_ints(tokens.inputs[1]) != [0]:
        return None
    if position_count(graph, tokens.outputs[0]) != UNLIMITED:
        return None
    return Alibi(slopes=parts[1], bf16=True)


def _times_slopes(node: gs.Node) -> tuple[gs.Tensor, np.ndarray] | None:
    """(what is multiplied, numbers [heads]) of a product with [heads, 1, 1]"""
    if not is_op(node, "Mul") or not isinstance(slopes := node.inputs[1], gs.Constant):
        return None
    shape = weight_shape(slopes)
    return (node.inputs[0], slopes.values.reshape(-1)) if shape == (slopes.values.size, 1, 1) else None


def _unrounded(tensor: gs.Tensor) -> gs.Tensor:
    """What was rounded to bf16; the tensor itself where it was not, which no pattern takes."""
    widened = producer(tensor)
    rounded = None if widened is None or not is_op(widened, "Cast") else producer(widened.inputs[0])
    if rounded is None or not is_op(rounded, "Cast") or rounded.attrs.get("to") != TensorProto.BFLOAT16:
        return gs.Variable("not rounded")
    return rounded.inputs[0]
