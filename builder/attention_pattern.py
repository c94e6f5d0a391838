"""Reads what stands around an Attention: how q, k and v come out of their products, are normed, rotated and masked.

q = [RotaryEmbedding(.)] ← Transpose([0, 2, 1, 3]) ← Reshape([0, 0, heads, head_dim]) ← product, or a part of one
An RmsNorm may stand before each of the three: in front of the reshape it runs over all heads together.
"""

import dataclasses

import onnx_graphsurgeon as gs

from ingot.builder.expressions import key
from ingot.builder.graph import (
    Graph,
    is_op,
    is_weight,
    optional_input,
    ours,
    producer,
    scalar,
    small_ints,
    weight_shape,
)
from ingot.builder.positions import UNLIMITED, position_count

SPLIT_HEADS = [0, 2, 1, 3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
    """Cos and Sin of position * inv_freq, times scale, and how they rotate a head."""

    inv_freq: gs.Tensor
    scale: float
    positions: int
    rotary_dim: int
    interleaved: bool

    def same_as(self, other: "Rotation") -> bool:
        """Whether two rotations compute the same."""
        compared = [(each.scale, each.rotary_dim, each.interleaved) for each in (self, other)]
        return key(self.inv_freq) == key(other.inv_freq) and compared[0] == compared[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of q, k, v: `source` [batch, sequence, heads * head_dim] becomes [batch, heads, sequence, head_dim].

    norm   weight of the RMS norm before the rotation, of one head or of all together
    """

    source: gs.Tensor
    heads: int
    head_dim: int
    rotation: Rotation | None
    norm: gs.Tensor | None
    norm_eps: float


def read_side(graph: Graph, tensor: gs.Tensor) -> Side | str:
    """The side that ends in `tensor`, or why it is none."""
    node, rotation = producer(tensor), None
    if node is not None and is_op(node, "RotaryEmbedding"):
        read = read_rotation(graph, node)
        if isinstance(read, str):
            return read
        rotation, node = read, producer(node.inputs[0])
    norms, node = _skip_norm([], node)
    if node is None or not is_op(node, "Transpose") or node.attrs.get("perm") != SPLIT_HEADS:
        return "q, k or v does not come from a transpose of [batch, sequence, heads, head_dim]"
    norms, reshape = _skip_norm(norms, producer(node.inputs[0]))
    if reshape is None or not is_op(reshape, "Reshape"):
        return "q, k or v does not come from a reshape into heads"
    shape = small_ints(reshape.inputs[1])
    if shape is None or len(shape) != 4 or shape[1] != 0 or shape[2] < 1 or shape[3] < 1:
        return f"q, k or v is not reshaped to [0, 0, heads, head_dim] but to {shape}"
    if rotation is not None and rotation.rotary_dim > shape[3]:
        return f"{rotation.rotary_dim} rotary dimensions do not fit into a head of {shape[3]}"
    widths = [shape[3]] * len(norms)
    source = reshape.inputs[0]
    if ours(producer(source), "RmsNorm"):
        norms, widths = [*norms, source.inputs[0]], [*widths, shape[2] * shape[3]]
        source = source.inputs[0].inputs[0]
    if len(norms) > 1 or any(weight_shape(norm.inputs[1]) != (n,) for norm, n in zip(norms, widths, strict=True)):
        return "q, k or v is normed more than once, or not over a head or all heads"
    norm = norms[0] if norms else None
    return Side(
        source=source,
        heads=shape[2],
        head_dim=shape[3],
        rotation=rotation,
        norm=None if norm is None else norm.inputs[1],
        norm_eps=0.0 if norm is None else float(norm.attrs["eps"]),
    )


def _skip_norm(norms: list[gs.Node], node: gs.Node | None) -> tuple[list[gs.Node], gs.Node | None]:
    """(norms and this one, the node before it) where `node` is a norm without residual."""
    if node is None or not ours(node, "RmsNorm") or optional_input(node, 2) is not None:
        return norms, node
    return [*norms, node], producer(node.inputs[0])


def read_window(graph: Graph, mask: gs.Tensor) -> int | str:
    """The window of the mask `row - column < window`, rows and columns being positions; or why it is none."""
    less = producer(mask)
    window = scalar(less.inputs[1]) if less is not None and is_op(less, "Less") else None
    if less is None or window is None or window < 1 or not is_distance(graph, less.inputs[0]):
        return "the attention takes a mask that is not a sliding window"
    return int(window)


def is_distance(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether a tensor is `row - column`, rows and columns being positions."""
    distance = producer(tensor)
    if distance is None or not is_op(distance, "Sub"):
        return False
    for each, axes in zip(distance.inputs, ([1], [0]), strict=True):
        node = producer(each)
        unlimited = position_count(graph, each) == UNLIMITED  # clipped positions would see further
        if node is None or not is_op(node, "Unsqueeze") or small_ints(node.inputs[1]) != axes or not unlimited:
            return False
    return True


def read_growth(graph: Graph, tensor: gs.Tensor) -> tuple[gs.Tensor, tuple[float, int]]:
    """(queries, (b, n)) of queries * (1 + b * log(1 + floor(position / n))); other values come back with b = 0."""
    plain = tensor, (0.0, 1)
    node = producer(tensor)
    if not is_op(node, "Mul"):
        return plain
    column, numbers = producer(node.inputs[1]), list[float]()
    if not is_op(column, "Unsqueeze") or small_ints(column.inputs[1]) != [1, 3]:
        return plain
    made = column.inputs[0]
    for op in ("Add", "Mul", "Log", "Add", "Floor", "Div"):
        step = producer(made)
        number = None if not is_op(step, op) or len(step.inputs) < 2 else scalar(step.inputs[1])
        if step is None or not is_op(step, op) or (number is None and len(step.inputs) > 1):
            return plain
        made = step.inputs[0]
        numbers += [] if number is None else [number]
    after, by, before, every = numbers
    whole = (after, before) == (1, 1) and by > 0 and every >= 1 and every == int(every)
    return (node.inputs[0], (by, int(every))) if whole and position_count(graph, made) is not None else plain


def read_rotation(graph: Graph, node: gs.Node) -> Rotation | str:
    """What a RotaryEmbedding does, or why it is not ours."""
    if optional_input(node, 3) is not None:
        return "the rotary embedding looks positions up in a table"
    cos, sin = (_scaled(tensor, op) for tensor, op in zip(node.inputs[1:3], ("Cos", "Sin"), strict=True))
    if isinstance(cos, str) or isinstance(sin, str):
        return cos if isinstance(cos, str) else str(sin)
    if cos[0] is not sin[0] or cos[1] != sin[1]:
        return "cosines and sines are not of the same angles"
    angle = producer(cos[0])
    if angle is None or not is_op(angle, "Mul"):
        return "the rotary angles are not a product of positions and frequencies"
    frequencies = [tensor for tensor in angle.inputs if is_weight(tensor)]
    others = [tensor for tensor in angle.inputs if not is_weight(tensor)]
    positions = position_count(graph, others[0]) if len(others) == 1 else None
    if positions is None:
        return "the rotary angles are not a product of positions and frequencies"
    half = weight_shape(frequencies[0])[-1]
    wanted = node.attrs.get("rotary_embedding_dim", 0)
    if wanted not in (0, 2 * half):
        return f"{half} frequencies do not rotate {wanted} dimensions"
    return Rotation(
        inv_freq=frequencies[0],
        scale=cos[1],
        positions=positions,
        rotary_dim=2 * half,
        interleaved=bool(node.attrs.get("interleaved", 0)),
    )


def _scaled(tensor: gs.Tensor, op: str) -> tuple[gs.Tensor, float] | str:
    """(angle, scale) of `op(angle)` or `op(angle) * scale`."""
    node, scale = producer(tensor), 1.0
    if node is not None and is_op(node, "Mul"):
        numbers = [scalar(each) for each in node.inputs]
        position = next((i for i, number in enumerate(numbers) if number is not None), None)
        if position is not None:
            scale, node = numbers[position] or 0.0, producer(node.inputs[1 - position])
    if node is None or not is_op(node, op):
        return f"the rotary embedding does not use {op} of an angle"
    return node.inputs[0], scale
