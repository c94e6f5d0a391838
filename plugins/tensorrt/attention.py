"""The attention of one layer as TensorRT sees it: a node with inputs and attributes, and the launches it stands for.

    positions ─▶ rope_table ─▶ cosines, sines (workspace)
                                   ▼
    qkv ───────────────────▶ rotate_and_store ─▶ q (workspace) ─▶ attention_prefill, attention_decode, ... ─▶ y
                                   └▶ keys, values (in place) ─────────┘

The kernels are those of the cuda targets, from the same cubin.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.dtypes import DType
from ingot.plan import CacheGroup
from ingot.plugins.cuda.attention import Places, Scores, attention_launches, rope_table_launch, write_launch
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Launch
from ingot.plugins.op_graph import OpNode

PLUGIN = "IngotAttention"
DOMAIN = "ingot"  # also the plugin's namespace
VERSION = "1"

PARTIAL_ROWS = 16 * 1024  # of partial sums, for which the workspace has room; a plan's splits need no more

_ALIGNMENT = 256
_ALWAYS = ("qkv", "keys", "values", "positions", "sequences", "tables", "decode", "prefill", "splits")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The attributes of a node, all of them numbers.

    rotary      dims of queries and keys that are rotated, 0: none
    rope_scale  of the cosines and sines, as in the op rope_table
    normed      1: there are norms of queries and keys
    narrow      1: y has the products' type, 0: float32
    others      as in the ops rope_kv_write and paged_attention
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens_per_block: int
    rotary: int
    normed: int
    interleaved: int
    narrow: int
    window: int
    rope_scale: float
    norm_eps: float
    scale: float
    softcap: float

    @classmethod
    def of(cls, table: OpNode | None, rotary: int, node: OpNode, kv: CacheGroup, *, narrow: bool) -> "Attention":
        """The attention of a PagedAttention. table: the RopeTable, if queries and keys are rotated; rotary: how many
        dims are."""
        return cls(
            layer=int(node.attrs["layer"]),
            heads=int(node.attrs["heads"]),
            kv_heads=int(node.attrs["kv_heads"]),
            head_dim=kv.head_dim,
            tokens_per_block=kv.tokens_per_block,
            rotary=rotary,
            rope_scale=1.0 if table is None else float(table.attrs["scale"]),
            normed=int(bool(node.inputs[2])),
            interleaved=int(node.attrs["interleaved"]),
            narrow=int(narrow),
            window=int(node.attrs["window"]),
            norm_eps=float(node.attrs["norm_eps"]),
            scale=float(node.attrs["scale"]),
            softcap=float(node.attrs["softcap"]),
        )

    def attributes(self) -> Mapping[str, Any]:
        """By name."""
        return dataclasses.asdict(self)


def plugin_inputs(attention: Attention) -> tuple[str, ...]:
    """Names of the node's inputs, in order."""
    return (*_ALWAYS, *(("inv_freq",) if attention.rotary else ()), *(("q_norm", "k_norm") if attention.normed else ()))


def workspace_bytes(attention: Attention, tokens: int) -> int:
    """For a step of this many tokens."""
    return _workspace(attention, tokens)[-1]


def _workspace(attention: Attention, tokens: int) -> Sequence[int]:
    """Where cosines and sines, queries, partial sums of splits and what these weigh begin, and where all of it ends;
    everything is float32."""
    sizes = (
        tokens * attention.rotary,
        tokens * attention.heads * attention.head_dim,
        PARTIAL_ROWS * attention.head_dim,
        2 * PARTIAL_ROWS,
    )
    return list(itertools.accumulate((-(-4 * size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


def _one_layer(attention: Attention, dtype: DType) -> CacheGroup:
    """The pools of one node: TensorRT binds each layer apart."""
    return CacheGroup(
        layers=(attention.layer,),
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        tokens_per_block=attention.tokens_per_block,
        dtype=dtype,
    )


def _rotation(attention: Attention, at: Mapping[str, int], cos_sin: int) -> list[Launch]:
    if not attention.rotary:
        return []
    return [
        rope_table_launch(
            cos_sin,
            inv_freq=at.get("inv_freq", 0),
            positions=at["positions"],
            half=attention.rotary // 2,
            scale=attention.rope_scale,
        )
    ]


def launches(
    attention: Attention, dtype: DType, shapes: Sequence[Sequence[int]], inputs: Sequence[int], y: int, workspace: int
) -> tuple[list[Launch], Counts, int]:
    """(launches, what their grids depend on, splits) of a step; the lengths are in the shapes.

    dtype      of the pools
    shapes, inputs  of the node's inputs, and their addresses
    """
    at = dict(zip(plugin_inputs(attention), inputs, strict=True))
    dims = dict(zip(plugin_inputs(attention), shapes, strict=True))
    tokens = dims["qkv"][0]
    cos_sin, queries, partial, stats, _ = (workspace + begin for begin in _workspace(attention, tokens))
    places = Places(
        keys=at["keys"],
        values=at["values"],
        tables=at["tables"],
        width=dims["tables"][1],
        q=queries,
        decode=at["decode"],
        prefill=at["prefill"],
        partial=partial,
        stats=stats,
    )
    kv = _one_layer(attention, dtype)
    write = write_launch(
        places,
        kv,
        qkv=at["qkv"],
        cos_sin=cos_sin if attention.rotary else 0,
        q_norm=at.get("q_norm", 0),
        k_norm=at.get("k_norm", 0),
        positions=at["positions"],
        sequences=at["sequences"],
        heads=attention.heads,
        rotary_dim=attention.rotary,
        interleaved=bool(attention.interleaved),
        wide_norm=bool(attention.normed) and dims["q_norm"][0] != attention.head_dim,
        eps=attention.norm_eps,
    )
    attend = attention_launches(
        places,
        kv,
        Scores(softcap=attention.softcap),
        y=y,
        heads=attention.heads,
        window=attention.window,
        scale=attention.scale,
        narrow=bool(attention.narrow),
    )
    counts = Counts(
        tokens=tokens,
        logit_rows=0,
        sequences=dims["tables"][0],
        decode=dims["decode"][0],
        prefill=dims["prefill"][0],
        longest=0,
    )
    return [*_rotation(attention, at, cos_sin), write, *attend], counts, dims["splits"][0]


def kernels(kv: CacheGroup) -> dict[str, int]:
    """Names of what `launches` launches, and how many bytes of dynamic shared memory each may take."""
    nowhere = Places(keys=0, values=0, tables=0, width=0, q=0, decode=0, prefill=0, partial=0, stats=0)
    write = write_launch(
        nowhere,
        kv,
        qkv=0,
        cos_sin=0,
        q_norm=0,
        k_norm=0,
        positions=0,
        sequences=0,
        heads=0,
        rotary_dim=0,
        interleaved=False,
        wide_norm=False,
        eps=0,
    )
    attend = attention_launches(nowhere, kv, Scores(), y=0, heads=0, window=0, scale=0, narrow=False)
    table = rope_table_launch(0, inv_freq=0, positions=0, half=0, scale=0)
    return {each.kernel: each.shared for each in (table, write, *attend)}
