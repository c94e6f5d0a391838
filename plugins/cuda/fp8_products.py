"""The launches of matrix products of FP8 weights with inputs in FP8, by the instructions of warpgroups (sm_90a) or of
warps (sm_89 and newer).

One kernel rounds the inputs of one or more products, others multiply: for every number of rows. Tiles are those of
wide_products.py: 128 rows of the weight, and 16, 64 or 128 rows of x. K is cut into parts up to as many rows as there.
"""

import dataclasses
from collections.abc import Iterator

from ingot.plan import Rows
from ingot.plan_tiles import Tile
from ingot.plugins.cuda.own_products import OwnProduct
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.wide_products import WIDE_THREADS, cut_up_to_some_rows, parts_of, rows_grid, sum_launch
from ingot.plugins.cuda.work import ANY_ROWS, Launch, integer, pointer, row_grid

_LINES, _STEP = 128, 128  # rows of the weight in a tile; k of a step, which are a line of it
_LINE_STAGES = 3  # tiles of the weight that warpgroups multiply
_ROUND_THREADS, _ROUND_STRIP = 256, 1024  # columns of a block


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """tokens: rows of x in a tile; stages: steps of x in shared memory; weight: steps of the weight, as codes and as
    lines of neighbouring k; threads: of a block; most: rows of x for which it is taken."""

    name: str
    tokens: int
    stages: int
    weight: int
    threads: int
    most: int = ANY_ROWS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: what steps take is more than the sums of a tile do."""
        of_x = self.tokens * _STEP + 4 * (self.tokens + _LINES)
        return self.stages * of_x + self.weight * _LINES * _STEP


def _of_warpgroups(tokens: int, codes: int, most: int = ANY_ROWS) -> _Kernel:
    """codes: steps of the weight's codes."""
    weight, threads = _LINE_STAGES + codes, WIDE_THREADS
    name = f"product_f8f8_wide_{tokens}"
    return _Kernel(name=name, tokens=tokens, stages=4, weight=weight, threads=threads, most=most)


def _of_warps(tokens: int, stages: int, threads: int, most: int = ANY_ROWS) -> _Kernel:
    """They multiply codes as they are copied. A block of sm_89 and sm_120 has 99 KiB."""
    name = f"product_f8f8_{tokens}"
    return _Kernel(name=name, tokens=tokens, stages=stages, weight=stages, threads=threads, most=most)


_WIDE_KERNELS = _of_warpgroups(16, 3, most=16), _of_warpgroups(64, 6, most=64), _of_warpgroups(128, 6)
_KERNELS = _of_warps(16, 5, 128, most=16), _of_warps(64, 4, 256, most=64), _of_warps(128, 3, 256)
_BY_NAME = {each.name: each for each in (*_WIDE_KERNELS, *_KERNELS)}
FP8_KERNELS = tuple(_BY_NAME)


def fp8_shared_bytes(kernel: str) -> int:
    """Dynamic shared memory of a kernel."""
    return _BY_NAME[kernel].shared_bytes


def fp8_threads(kernel: str) -> int:
    """Threads of a kernel's block."""
    return _BY_NAME[kernel].threads


def fp8_kernel(rows: int, *, wide: bool) -> str:
    """The kernel of the smallest tile that holds this many rows of x. wide: by warpgroups."""
    return next(each.name for each in _kernels(wide=wide) if each.tokens >= rows)


def fp8_parts(n: int, k: int) -> int:
    """Into how many parts K is cut where one tile has all rows of x."""
    return parts_of(n, k, _STEP)


def fp8_tiles(n: int, k: int, *, wide: bool) -> Iterator[Tile]:
    """Which kernel computes each number of rows, and into how many parts K is cut. wide: by warpgroups."""
    parts = fp8_parts(n, k)
    return cut_up_to_some_rows([_tile(each, each.most, parts) for each in _kernels(wide=wide)], 0, ANY_ROWS)


def fp8_kernels(k: int, *, wide: bool) -> list[Tile]:
    """Every kernel that computes a product, with the most parts of K: none may be empty."""
    return [_tile(each, ANY_ROWS, -(-k // _STEP)) for each in _kernels(wide=wide)]


def _kernels(*, wide: bool) -> tuple[_Kernel, ...]:
    return _WIDE_KERNELS if wide else _KERNELS


def _tile(kernel: _Kernel, most: int, parts: int) -> Tile:
    return Tile(most_rows=most, kernel=kernel.name, rows=kernel.tokens, parts=parts)


def round_launch(
    codes: int, scales: int, x: int, *, k: int, filled: int, group: int, rows: Rows, slots: int = 1
) -> Launch:
    """The op round_to_fp8. codes: fp8 [rows, slots, filled]; x: float32 [rows, slots, k]; a slot is a row of the
    kernel."""
    strips, of_rows = -(-filled // _ROUND_STRIP) if group else 1, row_grid(rows)

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        return slots * of_rows(counts, splits)[0], strips, 1

    return Launch(
        kernel="round_to_fp8",
        grid=grid,
        threads=_ROUND_THREADS,
        shared=0,
        arguments=(*map(pointer, (codes, scales, x)), *map(integer, (k, filled, group))),
    )


def fp8_launches(product: OwnProduct, scales: int, tile: Tile, rows: range, sums: int) -> Iterator[Launch]:
    """For these numbers of rows one kernel runs, and the sum of its parts if K is cut. product.x: where codes lie;
    scales: where theirs lie; sums: where those of parts lie."""
    tiles = -(-product.cols // (_LINES // 2 if product.gated else _LINES))
    of_parts = sums if tile.parts > 1 else 0
    yield Launch(
        kernel=tile.kernel,
        grid=rows_grid(product, rows, lambda count: (-(-count // tile.rows), tiles, tile.parts)),
        threads=fp8_threads(tile.kernel),
        shared=fp8_shared_bytes(tile.kernel),
        arguments=(*product.arguments, pointer(scales), pointer(of_parts)),
    )
    if tile.parts > 1:
        yield sum_launch(product, tile.parts, sums, rows)
