"""Everything between the qkv product and the output product → one PagedAttention, and one RopeTable for all layers.

qkv ─ Split ┬ Reshape ─ [RmsNorm] ─ Transpose ─ RotaryEmbedding ┐
            ├ Reshape ─ [RmsNorm] ─ Transpose ─ RotaryEmbedding ┼ Attention ─ Transpose ─ Reshape
            └ Reshape ─ Transpose ──────────────────────────────┤
                                          mask of a window, if any

The mask may have sinks as its last column: `sink_pattern.py`.
"""

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.attention_pattern import SPLIT_HEADS, Rotation, Side, read_side, read_window
from ingot.builder.expressions import key
from ingot.builder.graph import Attr, Graph, is_op, optional_input, producer, small_ints, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Op, X
from ingot.builder.sink_pattern import read_sinks, without_sink

_MASKS = {4: "a past key", 5: "a past value", 6: "lengths without padding"}
_UNKNOWN = {"qk_matmul_output_mode": 0, "q_num_heads": None, "kv_num_heads": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    qkv: gs.Tensor
    q: Side
    k: Side
    rotation: Rotation | None


def _read(graph: Graph, match: Match) -> _Parts | str:
    """The parts of the match, or why it stays as it is."""
    sides = []
    for name in ("q", "k", "v"):
        side = read_side(graph, without_sink(match[name]))
        if isinstance(side, str):
            return side
        sides.append(side)
    q, k, v = sides
    if k.heads != v.heads or not q.head_dim == k.head_dim == v.head_dim or q.heads % k.heads:
        return f"heads {[side.heads for side in sides]} of {[side.head_dim for side in sides]} do not fit together"
    if v.rotation is not None or (q.rotation is None) != (k.rotation is None):
        return "q and k are not rotated alike, or v is rotated"
    if v.norm is not None or (q.norm is not None and k.norm is not None and q.norm_eps != k.norm_eps):
        return "q and k are not normed alike, or v is normed"
    if q.rotation is not None and k.rotation is not None and not q.rotation.same_as(k.rotation):
        return "q and k are not rotated alike"
    split = producer(q.source)
    if split is None or not is_op(split, "Split") or any(producer(side.source) is not split for side in sides):
        return "q, k and v are not parts of one product"
    if any(tensor is not side.source for tensor, side in zip(split.outputs, sides, strict=False)):
        return "the product does not hold q, k and v in this order"
    sizes = [side.heads * side.head_dim for side in sides]
    if len(split.outputs) != 3 or (small_ints(optional_input(split, 1)) or sizes) != sizes:
        return "the product does not hold q, k and v alone"
    return _Parts(qkv=split.inputs[0], q=q, k=k, rotation=q.rotation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seen:
    """window: 0 for none. weight: of the sinks, if there are any"""

    window: int = 0
    weight: gs.Tensor | None = None


def _read_seen(graph: Graph, attention: gs.Node) -> _Seen | str:
    """What a token attends to, or why that is something else than this op has."""
    mask = optional_input(attention, 3)
    if not attention.attrs.get("is_causal", 0):
        sinks = "the attention is not causal" if mask is None else read_sinks(graph, attention)
        return sinks if isinstance(sinks, str) else _Seen(window=sinks.window, weight=sinks.weight)
    if any(without_sink(each) is not each for each in attention.inputs[1:3]):
        return "a causal attention has a key or value of zeros"
    window = 0 if mask is None else read_window(graph, mask)
    return window if isinstance(window, str) else _Seen(window=window)


def _check(graph: Graph, match: Match) -> str | None:
    attention = match["attention"]
    if mask := next((what for index, what in _MASKS.items() if optional_input(attention, index) is not None), None):
        return f"the attention takes {mask}"
    if isinstance(seen := _read_seen(graph, attention), str):
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
    if seen.weight is not None and weight_shape(seen.weight)[1] != parts.q.heads:
        return "the sinks are not one number for each head"
    shape = small_ints(match.root.inputs[1])
    width = parts.q.heads * parts.q.head_dim
    return None if shape in ([0, 0, width], [0, 0, -1]) else f"the heads are merged to {shape}, not to [0, 0, {width}]"


def _rewrite(graph: Graph, match: Match) -> None:
    parts = _read(graph, match)
    assert not isinstance(parts, str), "check has read them"
    dim, seen = parts.q.head_dim, _read_seen(graph, match["attention"])
    assert not isinstance(seen, str), "check has read it"
    attrs: dict[str, Attr] = {
        "layer": len(graph.plugins("PagedAttention")),
        "heads": parts.q.heads,
        "kv_heads": parts.k.heads,
        "head_dim": dim,
        "scale": float(match["attention"].attrs.get("scale") or 1 / np.sqrt(dim)),
        "interleaved": int(parts.rotation is not None and parts.rotation.interleaved),
        "window": seen.window,
        "softcap": float(match["attention"].attrs.get("softcap", 0.0)),
        "norm_eps": max(parts.q.norm_eps, parts.k.norm_eps),
    }
    table = None if parts.rotation is None else _rope_table(graph, parts.rotation)
    inputs = [parts.qkv, table, parts.q.norm, parts.k.norm]
    if seen.weight is not None:
        flat = graph.constant(np.array([parts.q.heads], np.int64))
        inputs += graph.insert("Reshape", [seen.weight, flat], {}, domain="")
    graph.replace(match.output, "PagedAttention", inputs, attrs)


def _rope_table(graph: Graph, rotation: Rotation) -> gs.Tensor:
    """The table of these frequencies, made at its first use."""
    wanted: dict[str, Attr] = {"scale": rotation.scale, "positions": rotation.positions}
    for node in graph.plugins("RopeTable"):
        if key(node.inputs[0]) == key(rotation.inv_freq) and node.attrs == wanted:
            return node.outputs[0]
    return graph.insert("RopeTable", [rotation.inv_freq], wanted)[0]


_ATTENTION = Op("Attention", X("q"), X("k"), X("v"), name="attention")

PASS = Fusion(
    name="insert_paged_attention",
    rules=[Rule(pattern=Op("Reshape", Op("Transpose", _ATTENTION, name="merge")), check=_check, rewrite=_rewrite)],
)
