"""The launches of latent attention, and of the matmuls that bring queries into the space of latents and latents out of
it: each head has a weight of its own."""

import dataclasses
from collections.abc import Mapping

from ingot.dtypes import DType
from ingot.plan import Attr, CacheGroup, Rows
from ingot.plugins.cuda.attention import Places
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.own_products import THREADS, shared_bytes
from ingot.plugins.cuda.shapes import LATENT_ROWS, Tiles, latent_shared_bytes
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Grid, Launch, count_of, integer, number, pointer, row_grid

_THREADS, _WARPS = 128, 4
_PAIR_ROWS, _BLOCK_PAIRS = 32, 4  # rows of a weight that are computed together, and how many such a block of many rows
_F32_ROWS, _F32_COLS = 16, 64


def write_latent_launch(
    at: Places,
    attrs: Mapping[str, Attr],
    *,
    x: int,
    latent: int,
    cos_sin: int,
    norm: int,
    positions: int,
    sequences: int,
    columns: int,
    rotary_dim: int,
) -> Launch:
    """Writes a token's row into the cache, and rotates its queries, of so many columns a head. at.q: where they go."""
    heads = int(attrs["heads"])
    arguments = (
        pointer(at.q),
        pointer(at.keys),
        pointer(x),
        pointer(latent),
        pointer(cos_sin),
        pointer(norm),
        pointer(positions),
        pointer(sequences),
        pointer(at.tables),
        integer(at.width),
        integer(heads),
        integer(columns),
        integer(rotary_dim),
        integer(attrs["interleaved"]),
        number(attrs["norm_eps"]),
        number(attrs["growth"]),
        integer(attrs["growth_every"]),
    )
    grid = row_grid(Rows.TOKENS, 1 + -(-heads // _WARPS))
    return Launch(kernel="write_latent", grid=grid, threads=_THREADS, shared=0, arguments=arguments)


def latent_attention_launches(
    at: Places, kv: CacheGroup, tiles: Tiles, *, y: int, heads: int, scale: float, narrow: bool
) -> list[Launch]:
    """narrow: y has the products' type."""
    decode_tiles, prompt_tiles = (-(-each * heads // LATENT_ROWS) for each in (tiles.decode, tiles.prefill))

    def prompts(counts: Counts, splits: int) -> tuple[int, int, int]:
        return counts.prefill, prompt_tiles, 1

    def decode(counts: Counts, splits: int) -> tuple[int, int, int]:
        return counts.decode, decode_tiles, splits

    def attend(kernel: str, items: int, grid: Grid, shared: int) -> Launch:
        arguments: tuple[Argument, ...] = (
            *(pointer(each) for each in (y, at.q, at.keys, items, at.tables, at.partial, at.stats)),
            integer(at.width),
            integer(heads),
            number(scale),
            integer(narrow),
        )
        return Launch(kernel=kernel, grid=grid, threads=_THREADS, shared=shared, arguments=arguments)

    if kv.dtype is DType.F32:
        return [attend("latent_rows", at.prefill, prompts, 0), attend("latent_rows", at.decode, decode, 0)]
    shared = latent_shared_bytes(kv.head_dim)
    combine = Launch(
        kernel="latent_combine",
        grid=decode,
        threads=_THREADS,
        shared=0,
        only_split=True,
        arguments=(*(pointer(each) for each in (y, at.decode, at.partial, at.stats)), integer(heads), integer(narrow)),
    )
    attention = "latent_attention"
    return [attend(attention, at.prefill, prompts, shared), attend(attention, at.decode, decode, shared), combine]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadProduct:
    """y[r, h] = [x[r, h, :k] . weight[h] | kept_from[r, h, k:]]. Addresses.

    x, kept_from  [rows, heads * (k + kept)], in the products' type, in float32
    weight        [heads, n, k]
    counts        how many rows the step has
    narrow        y has the products' type, else float32
    """

    y: int
    x: int
    kept_from: int
    weight: int
    counts: int
    heads: int
    n: int
    k: int
    kept: int
    narrow: bool
    dtype: DType
    rows: Rows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """tile: rows that a block computes, in steps of more than `above` and at most `most` rows."""

    tile: int
    above: int
    most: int


_ANY = 1 << 30
_KERNELS = (
    _Kernel(tile=8, above=0, most=8),
    _Kernel(tile=64, above=8, most=64),
    _Kernel(tile=128, above=64, most=_ANY),
)


def head_launches(product: HeadProduct) -> list[Launch]:
    """For each number of rows, one of them runs."""
    if product.dtype is DType.F32:
        return [_launch(product, "heads_f32", _grid(product, _F32_ROWS, _F32_COLS, 0, _ANY), 0)]
    few, *many = _KERNELS
    launches = [_launch(product, "heads_8", _few_grid(product, few.most), 0)]
    for each in many:
        grid = _grid(product, each.tile, _PAIR_ROWS * _BLOCK_PAIRS, each.above, each.most)
        launches.append(_launch(product, f"heads_{each.tile}", grid, shared_bytes(each.tile)))
    return launches


def _few_grid(product: HeadProduct, most: int) -> Grid:
    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        few = 0 < count_of(product.rows, counts) <= most
        return (-(-product.n // _PAIR_ROWS), 1, product.heads) if few else (0, 0, 0)

    return grid


def _grid(product: HeadProduct, tile: int, columns: int, above: int, most: int) -> Grid:
    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        rows = count_of(product.rows, counts)
        return (-(-rows // tile), -(-product.n // columns), product.heads) if above < rows <= most else (0, 0, 0)

    return grid


def _launch(product: HeadProduct, kernel: str, grid: Grid, shared: int) -> Launch:
    arguments: tuple[Argument, ...] = (
        *(pointer(each) for each in (product.y, product.x, product.kept_from, product.weight, product.counts)),
        *(integer(each) for each in (product.heads, product.n, product.k, product.kept, product.narrow)),
    )
    return Launch(kernel=kernel, grid=grid, threads=THREADS, shared=shared, arguments=arguments)
