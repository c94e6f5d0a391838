"""Multi-head latent attention, whose products of keys and values are absorbed → LatentKvWrite, HeadMatmul,
LatentAttention and HeadMatmul.

product ─ Reshape ─ Transpose ─ Split ┬ MatMul(keys) ──────── ┐
                                      └ [RotaryEmbedding] ─── Concat ┐
                                                                     Attention ─ MatMul(values) ─ Transpose ─ Reshape
product ─ Split ┬ RmsNorm ─ Unsqueeze ────────── ┬ ─ Concat ─────────┤
                └ Unsqueeze ─ [RotaryEmbedding] ─┘  └────────────────┘
"""

import dataclasses

import onnx_graphsurgeon as gs

from ingot.builder.attention_pattern import SPLIT_HEADS, Rotation, read_growth, read_rotation
from ingot.builder.graph import Attr, Graph, is_op, is_weight, optional_input, ours, producer, small_ints, weight_shape
from ingot.builder.node_kinds import count_of, writes_kv
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.passes.insert_paged_attention import rope_table
from ingot.builder.rewrite import Match, Op, W, X

_SWAPPED = [0, 2, 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """query [batch, sequence, heads * (K + rotary_dim)], latent [batch, sequence, rank + rotary_dim]; keys: a weight
    [heads, K, rank]."""

    query: gs.Tensor
    latent: gs.Tensor
    keys: gs.Tensor
    norm: gs.Tensor
    eps: float
    heads: int
    rank: int
    rotary_dim: int
    rotation: Rotation | None
    growth: tuple[float, int]


def _joined(tensor: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor] | None:
    """The two parts of the last dimension."""
    node = producer(tensor)
    if not is_op(node, "Concat") or len(node.inputs) != 2 or node.attrs["axis"] not in (-1, 3):
        return None
    return node.inputs[0], node.inputs[1]


def _part(tensor: gs.Tensor, index: int, rank: int) -> tuple[gs.Node, list[int]] | None:
    """(the Split of the last dimension into two that gives `tensor` as its part `index`, their sizes)."""
    node = producer(tensor)
    if not is_op(node, "Split") or len(node.outputs) != 2 or node.attrs.get("axis", 0) not in (-1, rank - 1):
        return None
    sizes = small_ints(optional_input(node, 1))
    return (node, sizes) if sizes is not None and len(sizes) == 2 and node.outputs[index] is tensor else None


def _unrotated(graph: Graph, tensor: gs.Tensor) -> tuple[gs.Tensor, Rotation | None] | str:
    """(what is rotated, how)"""
    node = producer(tensor)
    if not is_op(node, "RotaryEmbedding"):
        return tensor, None
    rotation = read_rotation(graph, node)
    return rotation if isinstance(rotation, str) else (node.inputs[0], rotation)


def _one_head(tensor: gs.Tensor) -> gs.Tensor | None:
    """What becomes the only head of a tensor."""
    node = producer(tensor)
    return node.inputs[0] if is_op(node, "Unsqueeze") and small_ints(node.inputs[1]) == [1] else None


def _read(graph: Graph, match: Match) -> _Parts | str:
    """The parts of the match, or why it stays as it is."""
    grown, growth = read_growth(graph, match["q"])
    queries, keys = _joined(grown), _joined(match["k"])
    if queries is None or keys is None:
        return "queries and keys are not a latent part and a rotated one"
    absorbed, value = producer(queries[0]), keys[0]
    if not is_op(absorbed, "MatMul") or not is_weight(absorbed.inputs[1]) or value is not match["v"]:
        return "values are not the first part of the keys, or queries are not multiplied into it"
    query, key = _unrotated(graph, queries[1]), _unrotated(graph, keys[1])
    if isinstance(query, str) or isinstance(key, str):
        return query if isinstance(query, str) else str(key)
    if (query[1] is None) != (key[1] is None) or (query[1] and key[1] and not query[1].same_as(key[1])):
        return "queries and keys are not rotated alike"
    still, rest = _part(absorbed.inputs[0], 0, 4), _part(query[0], 1, 4)
    if still is None or rest is None or still[0] is not rest[0]:
        return "the two parts of the queries are not those of one product"
    heads = producer(still[0].inputs[0])
    reshape = (
        producer(heads.inputs[0]) if is_op(heads, "Transpose") and heads.attrs.get("perm") == SPLIT_HEADS else None
    )
    shape = small_ints(reshape.inputs[1]) if is_op(reshape, "Reshape") else None
    if reshape is None or shape is None or len(shape) != 4 or shape[1] != 0 or shape[2] < 1:
        return "the queries are not split into heads"
    latent, shared = _one_head(value), _one_head(key[0])
    norm = producer(latent) if latent is not None else None
    if norm is None or not ours(norm, "RmsNorm") or optional_input(norm, 2) is not None or shared is None:
        return "the latent is not normed, or it has more than one head"
    first, second = _part(norm.inputs[0], 0, 3), _part(shared, 1, 3)
    if first is None or second is None or first[0] is not second[0]:
        return "the latent and the rotated key are not parts of one product"
    (rank, width), (k, q_width), weight = first[1], still[1], weight_shape(absorbed.inputs[1])
    if q_width != width or weight != (shape[2], k, rank) or shape[3] != k + width:
        return f"keys of {rank} and {width} numbers do not fit queries of {k} and {q_width} with weights {weight}"
    return _Parts(
        query=reshape.inputs[0],
        latent=first[0].inputs[0],
        keys=absorbed.inputs[1],
        norm=norm.inputs[1],
        eps=float(norm.attrs["eps"]),
        heads=shape[2],
        rank=rank,
        rotary_dim=width,
        rotation=query[1],
        growth=growth,
    )


def _check(graph: Graph, match: Match) -> str | None:
    attention = match["attention"]
    if not attention.attrs.get("is_causal", 0) or any(optional_input(attention, i) is not None for i in range(3, 7)):
        return "the attention is not causal alone"
    if attention.attrs.get("softcap", 0.0) or not attention.attrs.get("scale"):
        return "the attention has a cap, or no scale of its own"
    if graph.users(attention.outputs[0]) > 1 or match["merge"].attrs.get("perm") != SPLIT_HEADS:
        return "the attention's results are used elsewhere, or not transposed back"
    parts = _read(graph, match)
    if isinstance(parts, str):
        return parts
    values, shape = weight_shape(match["values"]), small_ints(match.root.inputs[1])
    if values[:2] != (parts.heads, parts.rank):
        return f"results of {parts.heads} heads of {parts.rank} do not fit the weights {values}"
    width = parts.heads * values[2]
    return None if shape in ([0, 0, width], [0, 0, -1]) else f"the heads are merged to {shape}, not to [0, 0, {width}]"


def _by_rows(graph: Graph, weight: gs.Tensor) -> gs.Tensor:
    """[heads, K, N] → [heads, N, K]; two transposes in a row vanish."""
    node = producer(weight)
    if is_op(node, "Transpose") and node.attrs.get("perm") == _SWAPPED:
        return node.inputs[0]
    return graph.insert("Transpose", [weight], {"perm": _SWAPPED}, domain="")[0]


def _rewrite(graph: Graph, match: Match) -> None:
    parts = _read(graph, match)
    assert not isinstance(parts, str), "check has read them"
    cache: dict[str, Attr] = {
        "layer": count_of(graph, writes_kv),
        "heads": parts.heads,
        "kv_heads": 1,
        "head_dim": parts.rank + parts.rotary_dim,
        "rank": parts.rank,
    }
    rotation: dict[str, Attr] = {
        "interleaved": int(parts.rotation is not None and parts.rotation.interleaved),
        "norm_eps": parts.eps,
        "growth": parts.growth[0],
        "growth_every": parts.growth[1],
    }
    table = None if parts.rotation is None else rope_table(graph, parts.rotation)
    written = graph.insert("LatentKvWrite", [parts.query, parts.latent, table, parts.norm], {**cache, **rotation})
    absorb: dict[str, Attr] = {"heads": parts.heads, "kept": parts.rotary_dim}
    query = graph.insert("HeadMatmul", [*written, _by_rows(graph, parts.keys)], absorb)
    scale: dict[str, Attr] = {"scale": float(match["attention"].attrs["scale"])}
    mixed = graph.insert("LatentAttention", query, {**cache, **scale})
    spread: dict[str, Attr] = {"heads": parts.heads, "kept": 0}
    graph.replace(match.output, "HeadMatmul", [*mixed, _by_rows(graph, match["values"])], spread)


_MIXED = Op("MatMul", Op("Attention", X("q"), X("k"), X("v"), name="attention"), W("values"))

PASS = Fusion(
    name="insert_latent_attention",
    rules=[Rule(pattern=Op("Reshape", Op("Transpose", _MIXED, name="merge")), check=_check, rewrite=_rewrite)],
)
