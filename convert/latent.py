"""Multi-head latent attention → its weights, and its nodes of the Graph, with the products of keys and values absorbed.

x ┬ q ─ Split ┬ MatMul(keys of each head) ─┐
  │           └ RotaryEmbedding ───────── Concat ─┐
  └ latent ─ Split ┬ norm ────────┬─────── Concat ─ Attention ─ MatMul(values of each head) ─ out
                   └ RotaryEmbedding ──────┘
Keys and values of a head are products of one normed latent. A query times such a key is the query times the weight,
times the latent; so one head of latents serves all queries, and nothing else need be kept of a token.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import onnx
from onnx import helper

from ingot.configs.model import LatentConfig, ModelConfig, RopeConfig
from ingot.convert.positions import query_growth

Shape = tuple[int, ...]
Attribute = int | float | str | list[int]

_NORM_EPS = 1e-6  # of latents, whatever the model's other norms have


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    nodes: list[onnx.NodeProto]

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def linear(self, x: str, path: str) -> str: ...

    def rotary_angles(self, rope: RopeConfig, positions: str) -> tuple[str, str]: ...

    def float32(self, name: str) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def latent_shapes(config: ModelConfig, latent: LatentConfig, path: str) -> dict[str, Shape]:
    """The weights of one layer's attention. kv holds the rows [key | value] of each head."""
    hidden, heads, rows = config.hidden_size, config.heads, latent.kv_rank + latent.rope_dim
    query = heads * config.head_dim
    shapes = {
        f"{path}/q/weight": (query, latent.q_rank or hidden),
        f"{path}/latent/weight": (rows, hidden),
        f"{path}/latent_norm/weight": (latent.kv_rank,),
        f"{path}/kv/weight": (heads * (latent.key_dim + latent.value_dim), latent.kv_rank),
        f"{path}/out/weight": (hidden, heads * latent.value_dim),
    }
    if latent.q_rank:
        shapes |= {f"{path}/q_a/weight": (latent.q_rank, hidden), f"{path}/q_a_norm/weight": (latent.q_rank,)}
    if config.qkv_bias:
        shapes |= {f"{path}/latent/bias": (rows,), f"{path}/out/bias": (hidden,)}
        shapes |= {f"{path}/q_a/bias": (latent.q_rank,)} if latent.q_rank else {}
    return shapes


def latent_attention(g: Nodes, x: str, config: ModelConfig, latent: LatentConfig, layer: int, positions: str) -> str:
    """[batch, sequence, hidden]"""
    path = f"layers.{layer}/attn"
    query = x
    if latent.q_rank:
        query = _norm(g, g.linear(x, f"{path}/q_a"), f"{path}/q_a_norm")
    shape = g.integers(f"heads_{config.heads}", [0, 0, config.heads, config.head_dim])
    split = g.node("Reshape", [g.linear(query, f"{path}/q"), shape], f"{path}/q/reshape")
    heads = g.node("Transpose", [split], f"{path}/q/heads", perm=[0, 2, 1, 3])
    still, rotary = _parts(g, heads, latent.key_dim, latent.rope_dim, f"{path}/q")
    low, shared = _parts(g, g.linear(x, f"{path}/latent"), latent.kv_rank, latent.rope_dim, f"{path}/latent")
    one = g.integers("axis_1", [1])
    value = g.node("Unsqueeze", [_norm(g, low, f"{path}/latent_norm"), one], f"{path}/latent/head")
    key = g.node("Unsqueeze", [shared, one], f"{path}/key/head")
    if config.rope is not None and layer not in config.still_layers:
        angles = g.rotary_angles(config.rope, positions)
        pairs = {"interleaved": 1} if config.rope.interleaved else {}
        rotary = g.node("RotaryEmbedding", [rotary, *angles], f"{path}/q/rotary", **pairs)
        key = g.node("RotaryEmbedding", [key, *angles], f"{path}/key/rotary", **pairs)
    inner = latent.key_dim + latent.value_dim
    stack = g.node(
        "Reshape",
        [g.float32(f"{path}/kv/weight"), g.integers("kv_heads", [config.heads, inner, latent.kv_rank])],
        f"{path}/kv/reshape",
    )
    absorbed = g.node("MatMul", [still, _rows(g, stack, 0, latent.key_dim, f"{path}/keys")], f"{path}/keys/matmul")
    queries = g.node("Concat", [absorbed, rotary], f"{path}/q/absorbed", axis=-1)
    if config.query_growth:
        queries = g.node("Mul", [queries, query_growth(g, config, positions)], f"{path}/q/grown")
    keys = g.node("Concat", [value, key], f"{path}/key", axis=-1)
    inputs = [queries, keys, value]
    mixed = g.node("Attention", inputs, f"{path}/attention", is_causal=1, scale=config.attention_scale)
    rows = _rows(g, stack, latent.key_dim, inner, f"{path}/values")
    weight = g.node("Transpose", [rows], f"{path}/values/transpose", perm=[0, 2, 1])
    values = g.node("MatMul", [mixed, weight], f"{path}/values/matmul")
    merged = g.node("Transpose", [values], f"{path}/merge/transpose", perm=[0, 2, 1, 3])
    width = config.heads * latent.value_dim
    merged = g.node("Reshape", [merged, g.integers(f"rows_{width}", [0, 0, width])], f"{path}/merge/reshape")
    return g.linear(merged, f"{path}/out")


def _rows(g: Nodes, stack: str, begin: int, end: int, path: str) -> str:
    """Rows [begin, end) of each head's matrix"""
    bounds = [g.integers(f"row_{begin}", [begin]), g.integers(f"row_{end}", [end]), g.integers("axis_1", [1])]
    return g.node("Slice", [stack, *bounds], f"{path}/rows")


def _parts(g: Nodes, x: str, first: int, second: int, path: str) -> tuple[str, str]:
    """The first columns, and those behind them"""
    names = [f"{path}/first", f"{path}/second"]
    inputs = [x, g.integers(f"parts_{first}_{second}", [first, second])]
    g.nodes.append(helper.make_node("Split", inputs, names, f"{path}/split", axis=-1))
    return names[0], names[1]


def _norm(g: Nodes, x: str, path: str) -> str:
    epsilon = float(np.float32(_NORM_EPS))
    return g.node("RMSNormalization", [x, g.float32(f"{path}/weight")], f"{path}/rms_norm", axis=-1, epsilon=epsilon)
