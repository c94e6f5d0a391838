"""The launches of a layer's attention, for callers that know where its tensors lie: cuda plans, TensorRT's plugin."""

import dataclasses

from ingot.dtypes import DType
from ingot.plan import CacheGroup, Rows
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.shapes import attention_shared_bytes, warpgroup_shared_bytes
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Grid, Launch, integer, number, pointer, row_grid

_ROW_THREADS, _ATTENTION_THREADS, _ROPE_THREADS, _WARP = 256, 128, 128, 32
_PROMPT_THREADS = 384  # three warpgroups


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Addresses of what both halves of a layer's attention see.

    keys, values  its pools               tables         of blocks, `width` integers a sequence
    q             between the two halves  decode, prefill  items
    partial, stats  of splits, see attention_combine        items   how many the step has of prefill, on the device
    """

    keys: int
    values: int
    tables: int
    width: int
    q: int
    decode: int
    prefill: int
    partial: int
    stats: int
    items: int = 0


def rope_table_launch(out: int, *, inv_freq: int, positions: int, half: int, scale: float) -> Launch:
    """Cosines, then sines, of every token's angles: exact also for large ones. out: float32 [tokens, 2 * half]."""
    arguments = (pointer(out), pointer(inv_freq), pointer(positions), integer(half), number(scale))
    grid, threads = row_grid(Rows.TOKENS), min(_ROW_THREADS, -(-half // 32) * 32)
    return Launch(kernel="rope_table", grid=grid, threads=threads, shared=0, arguments=arguments)


def write_launch(
    at: Places,
    kv: CacheGroup,
    *,
    qkv: int,
    cos_sin: int,
    q_norm: int,
    k_norm: int,
    positions: int,
    sequences: int,
    heads: int,
    rotary_dim: int,
    interleaved: bool,
    wide_norm: bool,
    eps: float,
    value_norm: bool = False,
    keys_as_values: bool = False,
) -> Launch:
    """Norms, rotates, and writes keys and values into the pools, the values as the op `rope_kv_write` says. Addresses
    are 0 where there is nothing."""
    made = (integer(value_norm), integer(keys_as_values)) if value_norm or keys_as_values else ()
    arguments = (
        pointer(at.q),
        pointer(at.keys),
        pointer(at.values),
        pointer(qkv),
        pointer(cos_sin),
        pointer(q_norm),
        pointer(k_norm),
        pointer(positions),
        pointer(sequences),
        pointer(at.tables),
        integer(at.width),
        integer(heads),
        integer(kv.kv_heads),
        integer(rotary_dim),
        integer(interleaved),
        integer(wide_norm),
        number(eps),
        *made,
    )
    kernel = "rotate_and_make_values" if made else "rotate_and_store"
    grid = _head_grid(kv.head_dim, heads + 2 * kv.kv_heads)
    return Launch(kernel=kernel, grid=grid, threads=_ROPE_THREADS, shared=0, arguments=arguments, head_dim=kv.head_dim)


def rotate_queries_launch(
    *,
    y: int,
    x: int,
    cos_sin: int,
    norm: int,
    positions: int,
    sequences: int,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    wide_norm: bool,
    eps: float,
) -> Launch:
    """Norms and rotates queries, as `write_launch` does: the same kernel, of a layer without keys."""
    arguments = (
        pointer(y),
        pointer(0),
        pointer(0),
        pointer(x),
        pointer(cos_sin),
        pointer(norm),
        pointer(0),
        pointer(positions),
        pointer(sequences),
        pointer(0),
        integer(0),
        integer(heads),
        integer(0),
        integer(rotary_dim),
        integer(interleaved),
        integer(wide_norm),
        number(eps),
    )
    return Launch(
        kernel="rotate_and_store",
        grid=_head_grid(head_dim, heads),
        threads=_ROPE_THREADS,
        shared=0,
        arguments=arguments,
        head_dim=head_dim,
    )


def _head_grid(head_dim: int, heads: int) -> Grid:
    """Blocks for the heads of every token, those of queries, keys and values."""
    return row_grid(Rows.TOKENS, -(-heads // (_ROPE_THREADS // _head_lanes(head_dim))))


def _head_lanes(head_dim: int) -> int:
    """Threads for a head: a power of two, so that no head lies in two warps. Each has 8 of its dims, padded to a
    multiple of 16, or several times 8 where a warp is too small."""
    return min(_WARP, 1 << (2 * -(-head_dim // 16) - 1).bit_length())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What becomes of scores beside their scale, as the op `paged_attention` says. sinks, slopes: addresses, or 0."""

    softcap: float = 0.0
    sinks: int = 0
    slopes: int = 0
    bf16_bias: bool = False
    growth: float = 0.0
    growth_every: int = 1

    @property
    def bent(self) -> bool:
        """Whether more than a scale changes a score."""
        return bool(self.softcap or self.slopes or self.growth)

    def arguments(self) -> tuple[Argument, ...]:
        """What the kernels take of it."""
        return (
            number(self.softcap),
            pointer(self.sinks),
            pointer(self.slopes),
            integer(self.bf16_bias),
            number(self.growth),
            integer(self.growth_every),
        )


def attention_launches(
    at: Places,
    kv: CacheGroup,
    scores: Scores,
    *,
    y: int,
    heads: int,
    window: int,
    scale: float,
    narrow: bool,
    parts: int = 1,
    exact: bool = False,
    multiprocessors: int = 0,
) -> list[Launch]:
    """Attends to the pools. narrow: y has the products' type; parts: tiles of an item of prefill, see prefill_parts;
    exact: multiplies in float32, whatever the cache has; multiprocessors: those that the
    kernel of takes_warpgroups shall fill, or 0 where it is not there."""
    out, partial, stats, codes = pointer(y), pointer(at.partial), pointer(at.stats), kv.has_codes

    def launch(kernel: str, items: int, grid: Grid, shared: int) -> Launch:
        arguments = (
            out,
            pointer(at.q),
            pointer(at.keys),
            pointer(at.values),
            pointer(items),
            pointer(at.tables),
            partial,
            stats,
            integer(at.width),
            integer(heads),
            integer(kv.kv_heads),
            integer(window),
            number(scale),
            *scores.arguments(),
            integer(narrow),
        )
        return _of_heads(kv, kernel, grid, arguments, shared)

    def prefill(counts: Counts, splits: int) -> tuple[int, int, int]:
        return counts.prefill, kv.kv_heads * parts, 1

    def pieces(counts: Counts, splits: int) -> tuple[int, int, int]:
        return min(multiprocessors, counts.prefill * kv.kv_heads * parts), 1, 1

    def rows(counts: Counts, splits: int) -> tuple[int, int, int]:
        return counts.prefill, kv.kv_heads, 1

    def whole(counts: Counts, splits: int) -> tuple[int, int, int]:
        return counts.decode, kv.kv_heads, 1

    def decode(counts: Counts, splits: int) -> tuple[int, int, int]:
        return counts.decode, kv.kv_heads, splits

    if exact or kv.dtype is DType.F32:
        return [launch("attention_rows", at.prefill, rows, 0), launch("attention_rows", at.decode, whole, 0)]
    merged = (out, pointer(at.decode), partial, stats, integer(heads), integer(kv.kv_heads), integer(window))
    arguments = (*merged, pointer(scores.sinks), integer(narrow))
    combine = dataclasses.replace(_of_heads(kv, "attention_combine", decode, arguments), only_split=True)
    if multiprocessors:
        kernel = "attention_prompt_bent" if scores.bent else "attention_prompt"
        prompt = launch(kernel, at.prefill, pieces, warpgroup_shared_bytes(kv.head_dim))
        more = (pointer(at.items), integer(parts))
        prompt = dataclasses.replace(prompt, threads=_PROMPT_THREADS, arguments=(*prompt.arguments, *more))
    else:
        shared = attention_shared_bytes(kv.head_dim, decode=False, codes=codes)
        prompt = launch("attention_prefill", at.prefill, prefill, shared)
    return [
        prompt,
        launch("attention_decode", at.decode, decode, attention_shared_bytes(kv.head_dim, decode=True, codes=codes)),
        combine,
    ]


def _of_heads(kv: CacheGroup, kernel: str, grid: Grid, arguments: tuple[Argument, ...], shared: int = 0) -> Launch:
    return Launch(
        kernel=kernel, grid=grid, threads=_ATTENTION_THREADS, shared=shared, arguments=arguments, head_dim=kv.head_dim
    )
