"""Everything between the qkv product and the output product → one PagedAttention, and one RopeTable for all layers.
An attention to keys and values that another one has made → SharedAttention.

qkv ─ Split ┬ Reshape ─ [RmsNorm] ─ Transpose ─ RotaryEmbedding ┐
            ├ Reshape ─ [RmsNorm] ─ Transpose ─ RotaryEmbedding ┼ Attention ─ Transpose ─ Reshape
            └ Reshape ─ [RmsNorm of ones] ─ Transpose ──────────┤
                                          mask of a window, if any

The mask may have sinks as its last column (`sink_pattern.py`), or numbers that fall with the distance
(`alibi_pattern.py`). Keys and values may be one part of the product.
"""

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.alibi_pattern import Alibi, read_alibi
from ingot.builder.attention_pattern import SPLIT_HEADS, Rotation, Side, read_growth, read_side, read_window
from ingot.builder.expressions import key
from ingot.builder.graph import Attr, Graph, is_op, optional_input, producer, small_ints, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Op, X
from ingot.builder.sink_pattern import read_sinks, without_sink

_MASKS = {4: "a past key", 5: "a past value", 6: "lengths without padding"}
_UNKNOWN = {"qk_matmul_output_mode": 0, "q_num_heads": None, "kv_num_heads": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """source: the product of q, k and v, or of q alone where `writer` is the attention that makes keys and values.
    growth: see the op"""

    source: gs.Tensor
    q: Side
    k: Side
    v: Side
    rotation: Rotation | None
    writer: gs.Node | None = None
    growth: tuple[float, int] = (0.0, 1)


def _read(graph: Graph, match: Match) -> _Parts | str:
    """The parts of the match, or why it stays as it is."""
    sides, (query, growth) = [], read_growth(graph, match["q"])
    for tensor in (query, match["k"], match["v"]):
        side = read_side(graph, without_sink(tensor))
        if isinstance(side, str):
            return side
        sides.append(side)
    q, k, v = sides
    if k.heads != v.heads or not q.head_dim == k.head_dim == v.head_dim or q.heads % k.heads:
        return f"heads {[side.heads for side in sides]} of {[side.head_dim for side in sides]} do not fit together"
    if v.rotation is not None or (q.rotation is None) != (k.rotation is None):
        return "q and k are not rotated alike, or v is rotated"
    if len({side.norm_eps for side in sides if side.norm is not None}) > 1:
        return "q, k and v are not normed alike"
    if v.norm is not None and not _is_ones(v.norm, v.head_dim):
        return "v is normed over more than a head, or with a weight"
    if q.rotation is not None and k.rotation is not None and not q.rotation.same_as(k.rotation):
        return "q and k are not rotated alike"
    return _from_product(graph, _Parts(source=q.source, q=q, k=k, v=v, rotation=q.rotation, growth=growth))


def _from_product(graph: Graph, parts: _Parts) -> _Parts | str:
    """The parts with their product, or with the attention that wrote keys and values."""
    q, k, v = parts.q, parts.k, parts.v
    split = producer(k.source)
    together = producer(v.source) is split
    if split is None or not is_op(split, "Split") or not together:
        return "q, k and v are not parts of one product"
    writer = _writer(graph, split.inputs[0], parts)
    if writer is not None and producer(q.source) is not split:
        return dataclasses.replace(parts, writer=writer)
    sides = (q, k) if k.source is v.source else (q, k, v)
    if any(tensor is not side.source for tensor, side in zip(split.outputs, sides, strict=False)):
        return "the product does not hold q, k and v in this order"
    sizes = [side.heads * side.head_dim for side in sides]
    if len(split.outputs) != len(sides) or (small_ints(optional_input(split, 1)) or sizes) != sizes:
        return "the product does not hold q, k and v alone"
    return dataclasses.replace(parts, source=split.inputs[0])


def _writer(graph: Graph, qkv: gs.Tensor, parts: _Parts) -> gs.Node | None:
    """The attention that makes the same keys and values of the same product."""
    table = None if parts.rotation is None else _find_table(graph, parts.rotation)
    wanted = _facts(parts)
    for node in graph.plugins("PagedAttention"):
        same = [optional_input(node, 1) is table, optional_input(node, 3) is parts.k.norm]
        if node.inputs[0] is qkv and all(same) and all(node.attrs[name] == each for name, each in wanted.items()):
            return node
    return None


def _facts(parts: _Parts) -> dict[str, Attr]:
    """What is made of keys and values."""
    return {
        "kv_heads": parts.k.heads,
        "head_dim": parts.k.head_dim,
        "interleaved": int(parts.rotation is not None and parts.rotation.interleaved),
        "norm_eps": max(parts.q.norm_eps, parts.k.norm_eps, parts.v.norm_eps),
        "value_norm": int(parts.v.norm is not None),
        "keys_as_values": int(parts.k.source is parts.v.source),
    }


def _kept(window: int, writer: gs.Node) -> bool:
    """Whether the writer's cache keeps all that a window sees, 0 for everything."""
    return not writer.attrs["window"] or 0 < window <= int(writer.attrs["window"])


def _is_ones(weight: gs.Tensor, size: int) -> bool:
    return isinstance(weight, gs.Constant) and weight_shape(weight) == (size,) and bool((weight.values == 1).all())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seen:
    """window: 0 for none. weight: of the sinks, if there are any. alibi: what is added to the scores"""

    window: int = 0
    weight: gs.Tensor | None = None
    alibi: Alibi | None = None


def _read_seen(graph: Graph, attention: gs.Node, scale: float) -> _Seen | str:
    """What a token attends to, or why that is something else than this op has."""
    mask = optional_input(attention, 3)
    if not attention.attrs.get("is_causal", 0):
        sinks = "the attention is not causal" if mask is None else read_sinks(graph, attention)
        return sinks if isinstance(sinks, str) else _Seen(window=sinks.window, weight=sinks.weight)
    if any(without_sink(each) is not each for each in attention.inputs[1:3]):
        return "a causal attention has a key or value of zeros"
    if mask is not None and (alibi := read_alibi(graph, attention, scale)) is not None:
        return _Seen(alibi=alibi)
    window = 0 if mask is None else read_window(graph, mask)
    return window if isinstance(window, str) else _Seen(window=window)


def _scale(attention: gs.Node) -> float:
    """Factor of the scores; 0 where it is the usual one."""
    return float(attention.attrs.get("scale") or 0)


def _check(graph: Graph, match: Match) -> str | None:
    attention = match["attention"]
    if mask := next((what for index, what in _MASKS.items() if optional_input(attention, index) is not None), None):
        return f"the attention takes {mask}"
    if isinstance(seen := _read_seen(graph, attention, _scale(attention)), str):
        return seen
    if strange := [key for key, usual in _UNKNOWN.items() if attention.attrs.get(key, usual) != usual]:
        return f"the attention has {', '.join(strange)}"
    if graph.users(attention.outputs[0]) > 1 or len([t for t in attention.outputs if graph.users(t)]) > 1:
        return "the attention's results are used elsewhere"
    if match["merge"].attrs.get("perm") != SPLIT_HEADS:
        return "the heads are not transposed back"
    parts = _read(graph, match)
    if isinstance(parts, str):
        return parts
    if parts.writer is not None and (seen.weight is not None or not _kept(seen.window, parts.writer)):
        return "the attention shares keys and values that are freed before, or has sinks beside them"
    if seen.weight is not None and weight_shape(seen.weight)[1] != parts.q.heads:
        return "the sinks are not one number for each head"
    if seen.alibi is not None and (len(seen.alibi.slopes) != parts.q.heads or parts.writer is not None):
        return "the mask has not one slope for each head, or keys and values are another layer's"
    shape = small_ints(match.root.inputs[1])
    width = parts.q.heads * parts.q.head_dim
    return None if shape in ([0, 0, width], [0, 0, -1]) else f"the heads are merged to {shape}, not to [0, 0, {width}]"


def _rewrite(graph: Graph, match: Match) -> None:
    parts = _read(graph, match)
    assert not isinstance(parts, str), "check has read them"
    dim, seen = parts.q.head_dim, _read_seen(graph, match["attention"], _scale(match["attention"]))
    assert not isinstance(seen, str), "check has read it"
    attrs: dict[str, Attr] = {
        **_facts(parts),
        "layer": len(graph.plugins("PagedAttention")) if parts.writer is None else int(parts.writer.attrs["layer"]),
        "heads": parts.q.heads,
        "scale": _scale(match["attention"]) or float(1 / np.sqrt(dim)),
        "window": seen.window,
        "growth": parts.growth[0],
        "growth_every": parts.growth[1],
        "softcap": float(match["attention"].attrs.get("softcap", 0.0)),
    }
    table = None if parts.rotation is None else rope_table(graph, parts.rotation)
    if parts.writer is not None:
        graph.replace(match.output, "SharedAttention", [parts.source, table, parts.q.norm], attrs)
        return
    inputs = [parts.source, table, parts.q.norm, parts.k.norm]
    if seen.weight is not None:
        flat = graph.constant(np.array([parts.q.heads], np.int64))
        inputs += graph.insert("Reshape", [seen.weight, flat], {}, domain="")
    if seen.alibi is not None:
        inputs += [None, graph.constant(seen.alibi.slopes.astype(np.float32))]
        attrs["bf16_bias"] = int(seen.alibi.bf16)
    graph.replace(match.output, "PagedAttention", inputs, attrs)


def rope_table(graph: Graph, rotation: Rotation) -> gs.Tensor:
    """The table of these frequencies, made at its first use."""
    found = _find_table(graph, rotation)
    return graph.insert("RopeTable", [rotation.inv_freq], _table_attrs(rotation))[0] if found is None else found


def _find_table(graph: Graph, rotation: Rotation) -> gs.Tensor | None:
    for node in graph.plugins("RopeTable"):
        if key(node.inputs[0]) == key(rotation.inv_freq) and node.attrs == _table_attrs(rotation):
            return node.outputs[0]
    return None


def _table_attrs(rotation: Rotation) -> dict[str, Attr]:
    return {"scale": rotation.scale, "positions": rotation.positions}


_ATTENTION = Op("Attention", X("q"), X("k"), X("v"), name="attention")

PASS = Fusion(
    name="insert_paged_attention",
    rules=[Rule(pattern=Op("Reshape", Op("Transpose", _ATTENTION, name="merge")), check=_check, rewrite=_rewrite)],
)
