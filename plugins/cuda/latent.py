"""The launches of latent attention, and of the matmuls that bring queries into the space of latents and latents out of
it: each head has a weight of its own."""

import dataclasses
from collections.abc import Mapping

from ingot.dtypes import DType
from ingot.plan import Attr, CacheGroup, Rows
from ingot.plan_tiles import Tile
from ingot.plugins.cuda.attention import Places
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.own_products import THREADS, shared_bytes
from ingot.plugins.cuda.shapes import LATENT_ROWS, Tiles, latent_shared_bytes
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import ANY_ROWS, Grid, Launch, count_of, integer, number, pointer, row_grid

_THREADS, _WARPS = 128, 4
_PAIR_ROWS, _BLOCK_PAIRS = 32, 4  # rows of a weight that are computed together, and how many such a block of many rows
_F32_ROWS, _F32_COLS = 16, 64
_MOST_ROWS = {8: 8, 64: 64, 128: ANY_ROWS}  # rows of a tile → of a step, up to which it is taken


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


def head_tiles(dtype: DType) -> list[Tile]:
    """Which kernel computes each number of rows."""
    if dtype is DType.F32:
        return [Tile(most_rows=ANY_ROWS, kernel="heads_f32", rows=_F32_ROWS)]
    return [Tile(most_rows=most, kernel=f"heads_{rows}", rows=rows) for rows, most in _MOST_ROWS.items()]


def head_kernels(dtype: DType) -> list[Tile]:
    """How many rows each of them computes at most: a block of the first one computes all of them."""
    return [each if each.rows == 8 else dataclasses.replace(each, most_rows=ANY_ROWS) for each in head_tiles(dtype)]


def head_launch(product: HeadProduct, tile: Tile, rows: range) -> Launch:
    """Runs for these numbers of rows."""
    exact, few = product.dtype is DType.F32, tile.rows == 8
    columns = _F32_COLS if exact else _PAIR_ROWS * (1 if few else _BLOCK_PAIRS)

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        count = count_of(product.rows, counts)
        if count not in rows:
            return 0, 0, 0
        blocks = -(-product.n // columns)
        return (blocks, 1, product.heads) if few else (-(-count // tile.rows), blocks, product.heads)

    arguments: tuple[Argument, ...] = (
        *(pointer(each) for each in (product.y, product.x, product.kept_from, product.weight, product.counts)),
        *(integer(each) for each in (product.heads, product.n, product.k, product.kept, product.narrow)),
    )
    shared = 0 if exact or few else shared_bytes(tile.rows)
    return Launch(kernel=tile.kernel, grid=grid, threads=THREADS, shared=shared, arguments=arguments)
