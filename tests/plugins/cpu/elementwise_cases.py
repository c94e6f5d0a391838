"""What kernels that compute each number from one number of every input are tried with."""

from collections.abc import Iterator

import numpy as np

from ingot.dtypes import DType
from ingot.plugins.activations import ACTIVATIONS
from tests.plugins.cpu.column_cases import ROWS, WIDTHS, Case, random_rows
from tests.plugins.cpu.one_step import plain_batch


def activation(dtype: DType) -> Iterator[Case]:
    for name in ACTIVATIONS:
        x = np.concatenate([np.linspace(-100, 100, 131), np.linspace(-9, 9, 524)]).astype(np.float32).reshape(131, 5)
        yield [x, None], {"activation": name}, plain_batch(131)
        yield [x, random_rows(1, 131, 5)], {"activation": name}, plain_batch(131)


def softcap(dtype: DType) -> Iterator[Case]:
    wide = np.concatenate([np.linspace(-100, 100, 131), np.linspace(-1, 1, 524)]).astype(np.float32).reshape(131, 5)
    for cap in (0.5, 30.0):
        yield [wide], {"cap": cap}, plain_batch(131)


def scale(dtype: DType) -> Iterator[Case]:
    for index, (rows, cols) in enumerate(zip(ROWS, WIDTHS[:5], strict=True)):
        yield [random_rows(index, rows, cols)], {"factor": (0.22, -3.0)[index % 2]}, plain_batch(rows)


def add_gated(dtype: DType) -> Iterator[Case]:
    for rows, cols in zip(ROWS, WIDTHS, strict=False):
        yield (
            [random_rows(0, rows, cols), random_rows(1, rows, cols), 30 * random_rows(2, rows, 1)],
            {},
            plain_batch(rows),
        )
