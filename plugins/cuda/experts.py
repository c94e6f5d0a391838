"""The launches of mixtures of experts: routing, rows sorted by expert, the products of experts, their weighted sums.

logits ─ moe_route ▶ ids, weights ─ group_by_expert ▶ lists: pairs, tiles ─ experts_* ▶ a result per pair ─ sum_experts
▶ y

A pair is a row and one of its slots. Grids depend on how many rows a step has, not on what they take, so that graphs
can be captured. The rows of an expert's tile have the bits that they would have in any other tile of its size; in
tiles of every size, where no warpgroups multiply.
"""

import dataclasses
from collections.abc import Mapping

from ingot.dtypes import DType
from ingot.plan import Attr, Rows
from ingot.plan_tiles import Tile
from ingot.plugins.cuda.fp8_products import fp8_kernel, fp8_shared_bytes, fp8_threads
from ingot.plugins.cuda.own_products import THREADS, shared_bytes
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.wide_products import WIDE_THREADS, wide_shared_bytes
from ingot.plugins.cuda.work import ANY_ROWS, Grid, Launch, count_of, integer, number, pointer, row_grid

MAX_EXPERTS = 1024  # as the kernel that routes remembers them
_WARP = 32
_PAIR_ROWS, _BLOCK_PAIRS = 32, 4  # rows of a weight that are computed together, and how many such a block of many rows
_F32_ROWS, _F32_COLS = 16, 64
_WIDE = "wide_"  # in the names of kernels whose warpgroups multiply


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Which experts the rows of a step take.

    ids     float32 [rows, slots], an address
    counts  how many rows the step has, an address
    lists   where they are sorted: pairs, behind those of the largest step the tiles. An address
    most    rows of the largest step
    """

    ids: int
    counts: int
    lists: int
    experts: int
    slots: int
    rows: Rows
    most: int

    @property
    def tiles(self) -> int:
        """Where they lie."""
        return self.lists + 4 * self.most * self.slots

    def pairs(self, counts: Counts) -> int:
        """How many a step has."""
        return count_of(self.rows, counts) * self.slots


def _tiles(pairs: int, experts: int, rows: int) -> int:
    """As many as any choice of experts can fill or begin: there is room for one of each pair."""
    return min(pairs, pairs // rows + experts)


SORT = "group_by_expert"
_AVERAGES = {8: 4, 64: 48, 128: ANY_ROWS}  # rows of a tile → rows of an expert, on average, up to which it is taken


def sort_tiles(experts: int, slots: int, *, exact: bool) -> list[Tile]:
    """Which tiles the rows of each expert are cut into, for each number of rows of a step. exact: in float32."""
    if exact:
        return [Tile(most_rows=ANY_ROWS, kernel=SORT, rows=_F32_ROWS)]
    return [
        Tile(most_rows=min(ANY_ROWS, average * experts // slots), kernel=SORT, rows=rows)
        for rows, average in _AVERAGES.items()
    ]


def expert_tiles(experts: int, slots: int, dtype: DType, *, wide: bool, fp8: bool = False) -> list[Tile]:
    """Which kernel computes the same tiles. wide: warpgroups do, where a tile has many rows; fp8: of codes on both
    sides, which warpgroups multiply in all tiles, or in none."""
    kind = f"{dtype.value}_" if dtype.is_quantised else ""
    if fp8:
        return [
            dataclasses.replace(each, kernel=fp8_kernel(each.rows, wide=wide).replace("product", "experts"))
            for each in sort_tiles(experts, slots, exact=False)
        ]
    if dtype is DType.F32:
        return [dataclasses.replace(each, kernel="experts_f32") for each in sort_tiles(experts, slots, exact=True)]
    return [
        dataclasses.replace(each, kernel=f"experts_{kind}{_WIDE if wide and each.rows > 8 else ''}{each.rows}")
        for each in sort_tiles(experts, slots, exact=False)
    ]


def expert_kernels(dtype: DType, *, wide: bool, fp8: bool = False) -> list[Tile]:
    """Every kernel of such products. Each computes any number of rows."""
    ways = [False, True] if wide and not fp8 else [wide]
    found = [tile for each in ways for tile in expert_tiles(1, 1, dtype, wide=each, fp8=fp8)]
    return [dataclasses.replace(each, most_rows=ANY_ROWS) for each in found]


def sort_kernels(*, exact: bool) -> list[Tile]:
    """The same of what sorts rows."""
    return [dataclasses.replace(each, most_rows=ANY_ROWS) for each in sort_tiles(1, 1, exact=exact)]


def route_launch(
    attrs: Mapping[str, Attr], *, ids: int, weights: int, logits: int, bias: int, experts: int, rows: Rows
) -> Launch:
    """A warp for each row. attrs: of the op `moe_route`; addresses, bias 0 where there is none."""
    slots, groups = int(attrs["per_token"]), int(attrs["groups"])
    arguments = (
        pointer(ids),
        pointer(weights),
        pointer(logits),
        pointer(bias),
        integer(experts),
        integer(slots),
        integer(attrs["score"] == "sigmoid"),
        integer(attrs["normalized"]),
        number(attrs["eps"]),
        number(attrs["floor"]),
        number(attrs["scale"]),
        integer(groups),
        integer(attrs["group_top"]),
        integer(attrs["group_best"]),
    )
    shared = 4 * (2 * experts + groups + 2 * slots)
    return Launch(kernel="moe_route", grid=row_grid(rows), threads=_WARP, shared=shared, arguments=arguments)


def sort_launch(taken: Taken, tile: Tile, rows: range) -> Launch:
    """Sorts the pairs by expert, in steps of these numbers of rows."""

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        return (taken.experts if count_of(taken.rows, counts) in rows else 0), 1, 1

    arguments = (
        pointer(taken.lists),
        pointer(taken.tiles),
        pointer(taken.ids),
        pointer(taken.counts),
        integer(taken.slots),
        integer(tile.rows),
    )
    return Launch(kernel=tile.kernel, grid=grid, threads=THREADS, shared=0, arguments=arguments)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertProduct:
    """y[pair] = epilogue(x[pair // each] . weight[expert of the pair]). Addresses; 0: no bias.

    n, k     rows and columns of one expert's weight, gate above up
    kind     the activation's number in the kernels
    narrow   y has the products' type, else float32
    scales   those of x, whose codes are FP8; None: x has the products' type
    limit    of a clamped gate, whose sigmoid takes `alpha` times it; 0: it is not clamped
    """

    y: int
    x: int
    weight: int
    bias: int
    n: int
    k: int
    each: int
    gated: bool
    kind: int
    narrow: bool
    dtype: DType
    group: int
    limit: float = 0.0
    alpha: float = 1.0
    scales: int | None = None

    @property
    def cols(self) -> int:
        """Columns of y."""
        return self.n // 2 if self.gated else self.n


def expert_launch(product: ExpertProduct, taken: Taken, tile: Tile, rows: range) -> Launch:
    """Runs for these numbers of rows of a step, whose pairs are sorted already in tiles of the same size."""
    threads, shared = THREADS, 0
    if product.scales is not None:
        same = tile.kernel.replace("experts", "product")  # which has the same tiles
        threads, shared = fp8_threads(same), fp8_shared_bytes(same)
    elif _WIDE in tile.kernel:
        threads, shared = WIDE_THREADS, wide_shared_bytes(tile.rows, product.dtype)
    elif tile.rows > 8 and product.dtype is not DType.F32:
        shared = shared_bytes(tile.rows)
    arguments = (
        pointer(product.y),
        pointer(product.x),
        pointer(product.weight),
        pointer(product.bias),
        pointer(taken.tiles),
        pointer(taken.lists),
        integer(product.each),
        integer(product.n),
        integer(product.k),
        integer(product.gated),
        integer(product.kind),
        integer(product.narrow),
        integer(product.group),
        number(product.limit),
        number(product.alpha),
        *(() if product.scales is None else (pointer(product.scales),)),
    )
    grid = _grid(product, taken, tile, rows)
    return Launch(kernel=tile.kernel, grid=grid, threads=threads, shared=shared, arguments=arguments)


def _grid(product: ExpertProduct, taken: Taken, tile: Tile, rows: range) -> Grid:
    weight_pairs = -(-product.cols // (_PAIR_ROWS // 2 if product.gated else _PAIR_ROWS))
    few = tile.rows <= 8 and product.scales is None

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        if count_of(taken.rows, counts) not in rows:
            return 0, 0, 0
        tiles = _tiles(taken.pairs(counts), taken.experts, tile.rows)
        if product.dtype is DType.F32:
            return tiles, -(-product.cols // _F32_COLS), 1
        return (weight_pairs, tiles, 1) if few else (tiles, -(-weight_pairs // _BLOCK_PAIRS), 1)

    return grid


def sum_launch(y: int, x: int, weights: int, *, cols: int, slots: int, rows: Rows) -> Launch:
    """y[row] = sum of weights[row, slot] * x[row, slot], in the order of the slots."""
    arguments = (pointer(y), pointer(x), pointer(weights), integer(cols), integer(slots))
    grid = row_grid(rows, -(-cols // (4 * THREADS)))
    return Launch(kernel="sum_experts", grid=grid, threads=THREADS, shared=0, arguments=arguments)
