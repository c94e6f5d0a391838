"""What kernels that compute each number from one number of every input are tried with."""

import importlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.registry import find_op
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


def elements(op: str, dtype: DType) -> Iterator[Case]:
    """Of an op that `tries` knows: with each of its attributes on all sizes."""
    count = len(find_op(op).inputs)
    for attrs, (rows, cols) in itertools.product(tries(op), zip(ROWS, WIDTHS[:5], strict=True)):
        yield [random_rows(index, rows, cols) for index in range(count)], attrs, plain_batch(rows)


def tries(op: str) -> Sequence[dict[str, Attr]]:
    """The attributes to try of an op that needs no cases of its own, because each element of its output follows from
    the same one of every input and from attributes: ATTRS of tests/plugins/ops/test_<op>.py. None of any other op."""
    spec = find_op(op)
    weights = (*spec.tables, *spec.vectors) or spec.packed is not None
    if not spec.is_step or weights or spec.of_tokens or spec.rows:
        return ()
    attrs: Sequence[dict[str, Attr]] = getattr(importlib.import_module(f"tests.plugins.ops.test_{op}"), "ATTRS", ())
    return attrs if spec.attrs else ({},)


def add_gated(dtype: DType) -> Iterator[Case]:
    for rows, cols in zip(ROWS, WIDTHS, strict=False):
        yield (
            [random_rows(0, rows, cols), random_rows(1, rows, cols), 30 * random_rows(2, rows, 1)],
            {},
            plain_batch(rows),
        )
