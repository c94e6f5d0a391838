"""The launches of matrix products by the instructions of warpgroups (sm_90a), for more than a few rows.

A thread block computes a tile of 128 rows of the weight and 64, 128 or 256 rows of x. Where a weight has fewer tiles
than a large GPU has multiprocessors, K is cut into parts, and a second launch adds their sums in order. Experts take
the same tiles of 64 and 128 rows of x, see experts.py.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from ingot.dtypes import DType
from ingot.plan_tiles import Tile
from ingot.plugins.cuda.own_products import FEW_ROWS, OwnProduct
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import ANY_ROWS, Grid, Launch, count_of, integer, pointer
from ingot.weight_formats import FORMATS, KEPT, PANEL

BESIDE_LIBRARY = 128  # rows up to which these kernels are faster than cuBLASLt
WIDE_THREADS = 384
_SUM_THREADS, _SUM_STRIP = 256, 4 * 256
_LINES, _LINE, _STEP, _ALIGN = 128, 128, 64, 1024  # rows of the weight, bytes of a row of x and k of a step; bytes
_BLOCKS, _MOST_PARTS, _LEAST_STEPS = 132, 8, 4  # of a large GPU at once; of K; of a part
_PARTED = 256  # rows of x up to which K is cut
_MOST_GROUPS, _BESIDE_PANEL = 4, 64  # of columns in a step; bytes between panels of kept codes in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """tokens: rows of x in a tile; stages: steps in shared memory, with so many bytes of the weight each; beside: bytes
    beside the steps; most: rows of x for which it is taken."""

    tokens: int
    stages: int
    weight: int
    beside: int = 0
    most: int = ANY_ROWS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: steps, or the sums of a tile."""
        stage = -(-(self.tokens * _LINE + self.weight) // _ALIGN) * _ALIGN
        return max(self.stages * stage + self.beside, 4 * (_LINES + 4) * self.tokens)


_BYTES = 8 << 10  # of codes in a step: 8 panels


def _of_floats() -> tuple[_Kernel, ...]:
    weight = 16 << 10
    return _Kernel(tokens=64, stages=8, weight=weight, most=64), _Kernel(tokens=128, stages=6, weight=weight)


def _of_codes(groups: int) -> tuple[_Kernel, ...]:
    """groups: bytes of what a panel's groups have in a step, at most."""
    weight = _BYTES + 8 * groups
    return (
        _Kernel(tokens=64, stages=6, weight=weight, most=64),
        _Kernel(tokens=128, stages=8, weight=weight, most=128),
        _Kernel(tokens=256, stages=5, weight=weight),
    )


def _of_kept_codes(dtype: DType) -> tuple[_Kernel, ...]:
    """Beside steps of x: three tiles of numbers, and steps of codes, which come earlier than x."""
    described = dtype.weight_format
    assert described is not None, "a format of codes"
    groups = _MOST_GROUPS * described.group_bytes + described.unit_bytes
    panel = _STEP * PANEL * described.bits // 8 + _BESIDE_PANEL + PANEL * groups
    few, more, many = (5, 8, 6) if described.bits <= 4 else (3, 6, 4)
    numbers, step = 3 * _LINES * 2 * _STEP, _LINES // PANEL * panel
    return (
        _Kernel(tokens=64, stages=4, weight=0, beside=numbers + few * step, most=64),
        _Kernel(tokens=128, stages=5, weight=0, beside=numbers + more * step, most=128),
        _Kernel(tokens=256, stages=4, weight=0, beside=numbers + many * step),
    )


_KEPT_TYPES = tuple(DType(name) for name, each in FORMATS.items() if set(each.precisions) <= set(KEPT))
_KERNELS = {
    DType.BF16: _of_floats(),
    DType.F16: _of_floats(),
    DType.W8: _of_codes(0),
    DType.W4: _of_codes(64),
    **{each: _of_kept_codes(each) for each in _KEPT_TYPES},
}
TYPES = tuple(_KERNELS)  # of weights that these kernels multiply


def multiplies(k: int, dtype: DType) -> bool:
    """Whether they compute products with a weight: rows of x are copied 16 bytes at a time."""
    return k % 8 == 0 and dtype in _KERNELS


def wide_shared_bytes(tokens: int, dtype: DType) -> int:
    """Dynamic shared memory of a kernel. tokens: rows of x in its tiles."""
    return next(each.shared_bytes for each in _KERNELS[dtype] if each.tokens == tokens)


def parts_of(n: int, k: int, step: int = _STEP) -> int:
    """Into how many parts K is cut where one tile has all rows of x. step: k of a step."""
    tiles, steps = -(-n // _LINES), -(-k // step)
    return max(1, min(_BLOCKS // tiles, _MOST_PARTS, steps // _LEAST_STEPS))


def wide_tiles(n: int, k: int, dtype: DType, most: int) -> Iterator[Tile]:
    """Which kernel computes each number of rows from FEW_ROWS + 1 to `most`, and into how many parts K is cut."""
    kernels = [_tile(dtype, each, each.most, parts_of(n, k)) for each in _KERNELS[dtype]]
    return cut_up_to_some_rows(kernels, FEW_ROWS, most)


def cut_up_to_some_rows(kernels: Iterable[Tile], before: int, most: int) -> Iterator[Tile]:
    """The tiles for more than `before` rows, up to `most`: with more rows than a few tiles have, K is not cut."""
    for kernel in kernels:
        for end, parts in ((_PARTED, kernel.parts), (ANY_ROWS, 1)):
            end = min(kernel.most_rows, end, most)
            if end > before:
                yield dataclasses.replace(kernel, most_rows=end, parts=parts)
                before = end


def _tile(dtype: DType, kernel: _Kernel, most: int, parts: int) -> Tile:
    kind = f"{dtype.value}_" if dtype.is_quantised else ""
    return Tile(most_rows=most, kernel=f"product_{kind}wide_{kernel.tokens}", rows=kernel.tokens, parts=parts)


def wide_kernels(product: OwnProduct) -> list[Tile]:
    """Every kernel that computes a product, with the most parts of K: none may be empty."""
    if not multiplies(product.k, product.dtype):
        return []
    parts = -(-product.k // _STEP)
    return [_tile(product.dtype, each, ANY_ROWS, parts) for each in _KERNELS[product.dtype]]


def wide_launches(product: OwnProduct, tile: Tile, rows: range, sums: int) -> Iterator[Launch]:
    """For these numbers of rows one kernel runs, and the sum of its parts if K is cut. sums: where these lie."""
    tiles = -(-product.cols // (_LINES // 2 if product.gated else _LINES))
    yield Launch(
        kernel=tile.kernel,
        grid=rows_grid(product, rows, lambda count: (-(-count // tile.rows), tiles, tile.parts)),
        threads=WIDE_THREADS,
        shared=wide_shared_bytes(tile.rows, product.dtype),
        arguments=(*product.arguments, pointer(sums if tile.parts > 1 else 0)),
    )
    if tile.parts > 1:
        yield sum_launch(product, tile.parts, sums, rows)


def sum_launch(product: OwnProduct, parts: int, sums: int, rows: range) -> Launch:
    """Adds up the sums of the parts of a product."""
    arguments = (
        pointer(product.y),
        pointer(sums),
        pointer(product.bias),
        pointer(product.residual),
        pointer(product.counts),
        integer(product.n),
        integer(product.gated),
        integer(product.kind),
        integer(product.narrow),
        integer(parts),
    )
    strips = -(-product.cols // _SUM_STRIP)
    grid = rows_grid(product, rows, lambda count: (count, strips, 1))
    return Launch(kernel="product_sum", grid=grid, threads=_SUM_THREADS, shared=0, arguments=arguments)


def rows_grid(product: OwnProduct, rows: range, blocks: Callable[[int], tuple[int, int, int]]) -> Grid:
    """Nothing runs for other numbers of rows."""

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        count = count_of(product.rows, counts)
        return blocks(count) if count in rows else (0, 0, 0)

    return grid
