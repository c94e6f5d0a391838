"""The launches of mixtures of experts: routing, rows sorted by expert, the products of experts, their weighted sums.

logits ─ moe_route ▶ ids, weights ─ group_by_expert ▶ lists: pairs, tiles ─ experts_* ▶ a result per pair ─ sum_experts
▶ y

A pair is a row and one of its slots. Grids depend on how many rows a step has, not on what they take, so that graphs
can be captured. The rows of an expert's tile have the bits that they would have in any other tile of its size; in
tiles of every size, where no warpgroups multiply.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from ingot.dtypes import DType
from ingot.plan import Attr, Rows
from ingot.plugins.cuda.own_products import THREADS, shared_bytes
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.wide_products import WIDE_THREADS, multiplies, wide_shared_bytes
from ingot.plugins.cuda.work import Grid, Launch, count_of, integer, number, pointer, row_grid

MAX_EXPERTS = 1024  # as the kernel that routes remembers them
_WARP = 32
_PAIR_ROWS, _BLOCK_PAIRS = 32, 4  # rows of a weight that are computed together, and how many such a block of many rows
_F32_ROWS, _F32_COLS = 16, 64


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """rows: of a tile. For more than `above` and at most `most` pairs per expert on average."""

    rows: int
    above: int
    most: int

    def computes(self, pairs: int, experts: int) -> bool:
        """Whether this is the kernel of a step."""
        return self.above * experts < pairs <= self.most * experts


_ANY = 1 << 30
_KERNELS = (
    _Kernel(rows=8, above=0, most=4),
    _Kernel(rows=64, above=4, most=48),
    _Kernel(rows=128, above=48, most=_ANY),
)
_KERNEL_F32 = _Kernel(rows=_F32_ROWS, above=0, most=_ANY)


def _kernels(dtype: DType) -> Sequence[_Kernel]:
    return (_KERNEL_F32,) if dtype is DType.F32 else _KERNELS


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


def sort_launches(taken: Taken, dtype: DType) -> list[Launch]:
    """Sort the pairs by expert, for products with weights of a type."""
    return [_sort(taken, each) for each in _kernels(dtype)]


def _sort(taken: Taken, kernel: _Kernel) -> Launch:
    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        return (taken.experts if kernel.computes(taken.pairs(counts), taken.experts) else 0), 1, 1

    arguments = (
        pointer(taken.lists),
        pointer(taken.tiles),
        pointer(taken.ids),
        pointer(taken.counts),
        integer(taken.slots),
        integer(kernel.rows),
    )
    return Launch(kernel="group_by_expert", grid=grid, threads=THREADS, shared=0, arguments=arguments)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertProduct:
    """y[pair] = epilogue(x[pair // each] . weight[expert of the pair]). Addresses; 0: no bias.

    n, k     rows and columns of one expert's weight, gate above up
    kind     the activation's number in the kernels
    narrow   y has the products' type, else float32
    limit    of a clamped gate, whose sigmoid takes `alpha` times it; 0: it is not clamped
    wide     warpgroups multiply tiles of many rows, if they can
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
    wide: bool = False

    @property
    def cols(self) -> int:
        """Columns of y."""
        return self.n // 2 if self.gated else self.n


def expert_launches(product: ExpertProduct, taken: Taken) -> list[Launch]:
    """For each number of pairs, one of them runs. The pairs are sorted already."""
    return [_product(product, taken, each) for each in _kernels(product.dtype)]


def _product(product: ExpertProduct, taken: Taken, kernel: _Kernel) -> Launch:
    few, wide = kernel.rows <= 8, product.wide and multiplies(product.k, product.dtype)
    kind = f"{product.dtype.value}_" if product.dtype.is_quantised else ""
    name, threads, shared = f"experts_{kind}{kernel.rows}", THREADS, 0 if few else shared_bytes(kernel.rows)
    if product.dtype is DType.F32:
        name, shared = "experts_f32", 0
    elif wide and not few:
        name, threads = f"experts_{kind}wide_{kernel.rows}", WIDE_THREADS
        shared = wide_shared_bytes(kernel.rows, product.dtype)
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
    )
    grid = _grid(product, taken, kernel)
    return Launch(kernel=name, grid=grid, threads=threads, shared=shared, arguments=arguments)


def _grid(product: ExpertProduct, taken: Taken, kernel: _Kernel) -> Grid:
    weight_pairs = -(-product.cols // (_PAIR_ROWS // 2 if product.gated else _PAIR_ROWS))

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        pairs = taken.pairs(counts)
        if not kernel.computes(pairs, taken.experts):
            return 0, 0, 0
        tiles = _tiles(pairs, taken.experts, kernel.rows)
        if product.dtype is DType.F32:
            return tiles, -(-product.cols // _F32_COLS), 1
        return (weight_pairs, tiles, 1) if kernel.rows <= 8 else (tiles, -(-weight_pairs // _BLOCK_PAIRS), 1)

    return grid


def sum_launch(y: int, x: int, weights: int, *, cols: int, slots: int, rows: Rows) -> Launch:
    """y[row] = sum of weights[row, slot] * x[row, slot], in the order of the slots."""
    arguments = (pointer(y), pointer(x), pointer(weights), integer(cols), integer(slots))
    grid = row_grid(rows, -(-cols // (4 * THREADS)))
    return Launch(kernel="sum_experts", grid=grid, threads=THREADS, shared=0, arguments=arguments)
