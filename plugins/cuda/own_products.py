"""The launches of ingot's own matrix products. Which kernel computes a row does not change its bits."""

import dataclasses

from ingot.dtypes import DType
from ingot.plan import Rows
from ingot.plan_tiles import Tile
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import ANY_ROWS, Launch, count_of, integer, pointer

FEW_ROWS = 16  # up to here weights are streamed through registers
THREADS = 256
HALF_PAIRS = 256  # weights of so few pairs are shared among twice as many blocks, or a large GPU would have too few
_PAIR_ROWS, _BLOCK_PAIRS, _STAGES, _LINE = 32, 4, 4, 64
_F32_ROWS, _F32_COLS = 16, 64  # of a block
_HALF = "_half"  # ends the names of kernels whose blocks take half a pair


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnProduct:
    """y = epilogue(x . weight). Addresses; 0 where there is nothing.

    x        [rows, k] in the products' type
    weight   floats: [n, k], gate above up
    counts   how many rows the step has
    kind     the activation's number in the kernels
    narrow   y has the products' type, else float32
    dtype    of the weight; of codes, which lie in panels, also `group`: columns that share a multiplier
    """

    y: int
    x: int
    weight: int
    bias: int
    residual: int
    counts: int
    n: int
    k: int
    gated: bool
    kind: int
    narrow: bool
    dtype: DType
    group: int
    rows: Rows

    @property
    def pairs(self) -> int:
        """Pairs of 16 rows of the weight; where there is a gate, 16 of gate and 16 of up."""
        return -(-self.cols // (_PAIR_ROWS // 2 if self.gated else _PAIR_ROWS))

    @property
    def cols(self) -> int:
        """Columns of y."""
        return self.n // 2 if self.gated else self.n

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """As the kernels take them (INGOT_PRODUCT in product.cuh)."""
        addresses = (self.y, self.x, self.weight, self.bias, self.residual, self.counts)
        numbers = (self.n, self.k, self.gated, self.kind, self.narrow, self.group)
        return (*map(pointer, addresses), *map(integer, numbers))


def product_kernels(dtype: DType, *, gated: bool) -> list[Tile]:
    """Every kernel of products with such weights, and how many rows it computes at most. Those of few rows compute all
    of them in a block, for 32 rows of the weight or, by halves, for 16."""
    if dtype is DType.F32:
        return [Tile(most_rows=ANY_ROWS, kernel="product_f32", rows=_F32_ROWS)]
    kind = f"product_{dtype.value}_" if dtype.is_quantised else "product_"
    few = [Tile(most_rows=rows, kernel=f"{kind}{rows}", rows=rows) for rows in (8, FEW_ROWS)]
    halves = [] if gated else [dataclasses.replace(each, kernel=f"{each.kernel}{_HALF}") for each in few]
    many = [Tile(most_rows=ANY_ROWS, kernel=f"{kind}{rows}", rows=rows) for rows in (64, 128)]
    return [*few, *halves, *many]


def product_tiles(n: int, dtype: DType, *, gated: bool) -> list[Tile]:
    """Which of them computes each number of rows. n: rows of the weight, gates and ups together."""
    halves = not gated and -(-n // _PAIR_ROWS) <= HALF_PAIRS
    chosen = {each.rows: each for each in product_kernels(dtype, gated=gated) if halves or _HALF not in each.kernel}
    return [dataclasses.replace(each, most_rows=64) if each.rows == 64 else each for each in chosen.values()]


def product_launch(product: OwnProduct, tile: Tile, rows: range) -> Launch:
    """Runs for these numbers of rows."""
    few = tile.rows <= FEW_ROWS and product.dtype is not DType.F32
    halves = tile.kernel.endswith(_HALF)

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        count = count_of(product.rows, counts)
        if count not in rows:
            return 0, 0, 0
        if product.dtype is DType.F32:
            return -(-count // tile.rows), -(-product.cols // _F32_COLS), 1
        if few:
            return (-(-product.n // (_PAIR_ROWS // 2)) if halves else product.pairs), 1, 1
        return -(-count // tile.rows), -(-product.pairs // _BLOCK_PAIRS), 1

    shared = 0 if few or product.dtype is DType.F32 else shared_bytes(tile.rows)
    return Launch(kernel=tile.kernel, grid=grid, threads=THREADS, shared=shared, arguments=product.arguments)


def shared_bytes(tile: int) -> int:
    """Dynamic shared memory of a kernel whose blocks compute tiles of that many rows."""
    return _STAGES * _LINE * (_BLOCK_PAIRS * _PAIR_ROWS + tile)
