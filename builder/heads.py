"""Reads what stands around an Attention: how q, k and v come out of their products, and how they are rotated.

q = [RotaryEmbedding(.)] Transpose([0, 2, 1, 3]) ← Reshape([0, 0, heads, head_dim]) ← product, or a part of one
"""

import dataclasses

import onnx_graphsurgeon as gs

from ingot.builder.expressions import key
from ingot.builder.graph import Graph, is_op, is_weight, optional_input, producer, scalar, small_ints, weight_shape
from ingot.builder.positions import position_count

SPLIT_HEADS = [0, 2, 1, 3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
    """Cos and Sin of position * inv_freq, times scale, and how they turn a head."""

    inv_freq: gs.Tensor
    scale: float
    positions: int
    rotary_dim: int
    interleaved: bool

    def same_as(self, other: "Rotation") -> bool:
        """Whether two rotations compute the same."""
        facts = [(each.scale, each.rotary_dim, each.interleaved) for each in (self, other)]
        return key(self.inv_freq) == key(other.inv_freq) and facts[0] == facts[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of q, k, v: `source` [batch, sequence, heads * head_dim] becomes [batch, heads, sequence, head_dim]."""

    source: gs.Tensor
    heads: int
    head_dim: int
    rotation: Rotation | None


def read_side(graph: Graph, tensor: gs.Tensor) -> Side | str:
    """The side that ends in `tensor`, or why it is none."""
    node, rotation = producer(tensor), None
    if node is not None and is_op(node, "RotaryEmbedding"):
        read = read_rotation(graph, node)
        if isinstance(read, str):
            return read
        rotation, node = read, producer(node.inputs[0])
    if node is None or not is_op(node, "Transpose") or node.attrs.get("perm") != SPLIT_HEADS:
        return "q, k or v does not come from a transpose of [batch, sequence, heads, head_dim]"
    reshape = producer(node.inputs[0])
    if reshape is None or not is_op(reshape, "Reshape"):
        return "q, k or v does not come from a reshape into heads"
    shape = small_ints(reshape.inputs[1])
    if shape is None or len(shape) != 4 or shape[1] != 0 or shape[2] < 1 or shape[3] < 1:
        return f"q, k or v is not reshaped to [0, 0, heads, head_dim] but to {shape}"
    if rotation is not None and rotation.rotary_dim > shape[3]:
        return f"{rotation.rotary_dim} rotary dimensions do not fit into a head of {shape[3]}"
    return Side(source=reshape.inputs[0], heads=shape[2], head_dim=shape[3], rotation=rotation)


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
        return "the rotary angles are no product of positions and frequencies"
    frequencies = [tensor for tensor in angle.inputs if is_weight(tensor)]
    others = [tensor for tensor in angle.inputs if not is_weight(tensor)]
    positions = position_count(graph, others[0]) if len(others) == 1 else None
    if positions is None:
        return "the rotary angles are no product of positions and frequencies"
    half = weight_shape(frequencies[0])[-1]
    wanted = node.attrs.get("rotary_embedding_dim", 0)
    if wanted not in (0, 2 * half):
        return f"{half} frequencies do not turn {wanted} dimensions"
    return Rotation(
        inv_freq=frequencies[0], scale=cos[1], positions=positions, rotary_dim=2 * half,
        interleaved=bool(node.attrs.get("interleaved", 0)),
    )  # fmt: skip


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
