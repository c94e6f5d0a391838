"""What kernels that move columns are tried with."""

from collections.abc import Iterator

import numpy as np

from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.op import Array
from ingot.step_io import StepBatch
from tests.plugins.cpu.one_step import Input, Packed, plain_batch

ROWS = (1, 15, 17, 63, 65)
WIDTHS = (1, 4, 15, 17, 63, 65, 172)
Case = tuple[list[Input], dict[str, Attr], StepBatch]


def random_rows(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def take_columns(dtype: DType) -> Iterator[Case]:
    for index, (rows, of) in enumerate(zip(ROWS, WIDTHS[1:6], strict=True)):
        for first, count in ((0, of), (of // 2, of - of // 2), (of - 1, 1)):
            yield [random_rows(index, rows, 3 * of)], {"of": of, "first": first, "count": count}, plain_batch(rows)


def gather_columns(dtype: DType) -> Iterator[Case]:
    """Every column once, some of them several times, and numbers beyond the columns."""
    random = np.random.default_rng(5)
    for index, (rows, cols) in enumerate(zip(ROWS, WIDTHS[:5], strict=True)):
        all_once, strange = random.permutation(cols), np.array([-3, cols, 1e30, np.inf, -np.inf])
        for order in (all_once, random.integers(0, cols, 2 * cols + 1), strange):
            yield [random_rows(index, rows, cols), Packed(values=order.astype(np.float32))], {}, plain_batch(rows)


def join_columns(dtype: DType) -> Iterator[Case]:
    for index, rows in enumerate(ROWS):
        parts: list[Input] = [random_rows(index + i, rows, WIDTHS[(index + i) % len(WIDTHS)]) for i in range(3)]
        yield parts, {}, plain_batch(rows)
        yield [*parts[:2], None], {}, plain_batch(rows)
