"""The launches of ingot's own matrix products. Which kernel computes a row does not change its bits."""

import dataclasses
from collections.abc import Sequence

from ingot.dtypes import DType
from ingot.plan import Rows
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Grid, Launch, count_of, integer, pointer

FEW_ROWS = 16  # up to here weights are streamed through registers
THREADS = 256
HALF_PAIRS = 256  # weights of so few pairs are shared among twice as many blocks, or a large GPU would have too few
_PAIR_ROWS, _BLOCK_PAIRS, _STAGES, _LINE = 32, 4, 4, 64


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
    def halves(self) -> bool:
        """Whether a block that computes few rows takes half a pair."""
        return not self.gated and self.pairs <= HALF_PAIRS

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """rows: in its name. For least to most rows. tile: of rows that a block computes; 0: all of them, a pair of the
    weight, or half of one."""

    rows: int
    least: int
    most: int
    tile: int


_ANY = 1 << 30
_KERNELS = (
    _Kernel(rows=8, least=1, most=8, tile=0),
    _Kernel(rows=16, least=9, most=FEW_ROWS, tile=0),
    _Kernel(rows=64, least=FEW_ROWS + 1, most=64, tile=64),
    _Kernel(rows=128, least=65, most=_ANY, tile=128),
)


def product_launches(product: OwnProduct, most: int = _ANY) -> Sequence[Launch]:
    """For each number of rows up to `most`, one of them runs."""
    if product.dtype is DType.F32:
        return [_launch(product, "product_f32", _grid_f32(product, most), 0)]
    kind = f"product_{product.dtype.value}_" if product.dtype.is_quantised else "product_"
    return [
        _launch(product, kind + _name(product, each), _grid(product, each), shared_bytes(each.tile))
        for each in _KERNELS
        if each.most <= most
    ]


def _name(product: OwnProduct, kernel: _Kernel) -> str:
    return f"{kernel.rows}_half" if product.halves and not kernel.tile else str(kernel.rows)


def shared_bytes(tile: int) -> int:
    """Dynamic shared memory of a kernel whose blocks compute tiles of that many rows; 0: all of few rows."""
    return _STAGES * _LINE * (_BLOCK_PAIRS * _PAIR_ROWS + tile) if tile else 0


def _launch(product: OwnProduct, kernel: str, grid: Grid, shared: int) -> Launch:
    return Launch(kernel=kernel, grid=grid, threads=THREADS, shared=shared, arguments=product.arguments)


def _grid(product: OwnProduct, kernel: _Kernel) -> Grid:
    pairs = product.pairs
    blocks = -(-product.n // (_PAIR_ROWS // 2)) if product.halves else pairs

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        rows = count_of(product.rows, counts)
        if not kernel.least <= rows <= kernel.most:
            return 0, 0, 0
        return (-(-rows // kernel.tile), -(-pairs // _BLOCK_PAIRS), 1) if kernel.tile else (blocks, 1, 1)

    return grid


def _grid_f32(product: OwnProduct, most: int) -> Grid:
    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        rows = count_of(product.rows, counts)
        return (-(-rows // 16), -(-product.cols // 64), 1) if rows <= most else (0, 0, 0)

    return grid
