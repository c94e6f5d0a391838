"""Which kernels compute a product: those that the Plan states are chosen here when an engine is built, and turned into
launches when a session opens.

rows      1 ... 8     ... 16        ... 64, 128, ...                  more
kernel    product_8   product_16    product_64, product_128           alike
          product_8   product_16    product_wide_64, ..., K in parts  product_wide_128, ... or cuBLASLt
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from ingot.dtypes import DType
from ingot.errors import REBUILD, EngineError
from ingot.plan import Plan, Rows, Step
from ingot.plan_tiles import Tile
from ingot.plugins.cuda.epilogues import library_work
from ingot.plugins.cuda.experts import expert_tiles, sort_tiles
from ingot.plugins.cuda.fp8_products import fp8_kernels, fp8_launches, fp8_tiles
from ingot.plugins.cuda.latent import head_tiles
from ingot.plugins.cuda.own_products import FEW_ROWS, OwnProduct, product_kernels, product_launch, product_tiles
from ingot.plugins.cuda.plan_facts import CUBLASLT, specialisation, takes_fp8, takes_library, takes_wide
from ingot.plugins.cuda.wide_products import BESIDE_LIBRARY, multiplies, wide_kernels, wide_launches, wide_tiles
from ingot.plugins.cuda.work import ANY_ROWS, Work
from ingot.plugins.registry import find_op


def tiles_of_step(plan: Plan, step: Step) -> tuple[Tile, ...]:
    """For all numbers of rows up to those of the largest step; nothing for other steps than products."""
    op, buffers = find_op(step.op), {buffer.name: buffer for buffer in plan.buffers}
    if op.lists:
        slots, exact = buffers[step.inputs[0]].cols, specialisation(plan).weight is DType.F32
        found: Iterable[Tile] = sort_tiles(int(step.attrs["experts"]), slots, exact=exact)
    elif op.packed is None:
        return ()
    else:
        weight = next(each for each in plan.weights if each.name == step.inputs[op.packed])
        wide = by_warpgroups(step, weight.shape[-1], weight.dtype)
        if op.experts:
            slots, fp8 = buffers[step.inputs[1]].cols, takes_fp8(step)
            found = expert_tiles(weight.shape[0], slots, weight.dtype, wide=wide, fp8=fp8)
        elif op.stacked:
            found = head_tiles(weight.dtype)
        else:
            n, k = weight.shape
            gated = op.gated(step.attrs)
            if takes_fp8(step):
                found = fp8_tiles(n, k, wide=wide)
            else:
                found = _matmul_tiles(n, k, weight.dtype, gated=gated, wide=wide, library=takes_library(step))
    limits = plan.limits
    tokens = buffers[step.outputs[0]].rows is Rows.TOKENS
    return tuple(_up_to(limits.max_num_tokens if tokens else limits.max_logit_rows, found))


def by_warpgroups(step: Step, k: int, dtype: DType) -> bool:
    """Whether warpgroups compute a step's product of many rows: of floats, where they can copy rows of k. k, dtype: of
    the weight."""
    return takes_wide(step) and (takes_fp8(step) or multiplies(k, dtype))


def _matmul_tiles(n: int, k: int, dtype: DType, *, gated: bool, wide: bool, library: bool) -> Iterator[Tile]:
    own = product_tiles(n, dtype, gated=gated)
    if not (wide or library):
        yield from own
        return
    yield from _up_to(FEW_ROWS, own)
    if wide:
        yield from wide_tiles(n, k, dtype, BESIDE_LIBRARY if library else ANY_ROWS)
    if library:
        yield Tile(most_rows=ANY_ROWS, kernel=CUBLASLT)


def _up_to(most: int, tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Those that up to `most` rows need."""
    for tile in tiles:
        if tile.most_rows >= most:
            yield dataclasses.replace(tile, most_rows=most)
            return
        yield tile


def in_ranges(plan: Plan, step: Step) -> list[tuple[Tile, range]]:
    """The tiles of a step, each with the numbers of rows for which it is taken. Raises EngineError where there are
    none."""
    found, least = list[tuple[Tile, range]](), 1
    for tile in plan.tiles_of(step.name):
        found.append((tile, range(least, tile.most_rows + 1)))
        least = tile.most_rows + 1
    if not found:
        raise EngineError(
            "the plan does not say which kernels compute a product", where=f"kernel call {step.name}", hint=REBUILD
        )
    return found


def matmul_work(step: Step, product: OwnProduct, tiles: Sequence[tuple[Tile, range]], sums: int) -> list[Work]:
    """sums: scratch memory, an address. Raises EngineError for kernels that do not compute the product."""
    own = product_kernels(product.dtype, gated=product.gated)
    wide = wide_kernels(product) if takes_wide(step) else []
    last = tiles[-1][0]
    library = [dataclasses.replace(last, parts=1, rows=0, kernel=CUBLASLT)] if takes_library(step) else []
    work: list[Work] = []
    for tile, rows in tiles:
        require_tile(step, tile, (*own, *wide, *(library if tile is last else ())))
        if tile.kernel == CUBLASLT:
            work += library_work(product, sums, least=rows.start)
        elif tile.kernel in {each.kernel for each in wide}:
            work += wide_launches(product, tile, rows, sums)
        else:
            work.append(product_launch(product, tile, rows))
    return work


def fp8_work(
    step: Step, product: OwnProduct, scales: int, tiles: Sequence[tuple[Tile, range]], sums: int
) -> Iterator[Work]:
    """As `matmul_work`, of a product whose inputs have been rounded to FP8. scales: theirs, an address."""
    for tile, rows in tiles:
        require_tile(step, tile, fp8_kernels(product.k, wide=takes_wide(step)))
        yield from fp8_launches(product, scales, tile, rows, sums)


def require_tile(step: Step, tile: Tile, known: Iterable[Tile]) -> None:
    """Raises EngineError unless one of the known kernels computes the tile, as many rows, and as many parts."""
    for each in known:
        same = (tile.kernel, tile.rows) == (each.kernel, each.rows)
        if same and tile.most_rows <= each.most_rows and tile.parts <= each.parts:
            return
    raise EngineError(
        "a kernel of the plan does not compute a product, or not in such tiles",
        where=f"kernel call {step.name}",
        expected=", ".join(dict.fromkeys(each.kernel for each in known)),
        got=f"{tile} in tiles of {tile.rows}",
        hint=REBUILD,
    )
