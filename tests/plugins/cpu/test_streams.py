"""Kernels of residual streams and of gates that are cut off, against the references."""

from collections.abc import Iterator

import numpy as np
import pytest

from ingot.plan import Attr
from ingot.plugins.cpu.native import kernel_table
from tests.plugins.cpu.one_step import Input, native_outputs, open_step, plain_batch, reference_outputs
from tests.plugins.ops.calls import random_array

pytestmark = pytest.mark.native

ROWS = (1, 15, 17, 63, 65)
OPS = ("mix_streams", "add_to_streams", "match_magnitude", "cut_below")
TOLERANCE = 6e-7  # of the largest number of the result
Case = tuple[list[Input], dict[str, Attr]]


def _streams(op: str) -> Iterator[Case]:
    for rows, width, count in zip(ROWS, (1, 15, 17, 63, 172), (1, 2, 3, 4, 16), strict=True):
        attrs: dict[str, Attr] = {"streams": count}
        x, made = random_array(rows, count * width, seed=width), 2 * random_array(rows, width, seed=1)
        if op == "mix_streams":
            yield [x, random_array(rows, count * count, seed=2)], attrs
        elif op == "add_to_streams":
            attrs["active"] = count // 2
            yield [x, made, random_array(rows, count, seed=2)], attrs
            yield [x, made, None], attrs
        else:
            x[0] *= 1e-6
            for joins in (0, 1):
                yield [x, made], {**attrs, "joins": joins, "least": 1e-5}


def _cut_below() -> Iterator[Case]:
    for index, (rows, cols) in enumerate(zip(ROWS, (1, 15, 17, 63, 300), strict=True)):
        yield [3 * random_array(rows, cols, seed=index) + 1], {"deviations": (1.64, -0.5)[index % 2]}


@pytest.mark.parametrize("kernel", [name for name in kernel_table() if name.split(".")[0] in OPS])
def test_matches_the_reference(kernel: str) -> None:
    op = kernel.split(".")[0]
    for inputs, attrs in _cut_below() if op == "cut_below" else _streams(op):
        assert isinstance(inputs[0], np.ndarray)
        batch = plain_batch(len(inputs[0]))
        (expected,) = reference_outputs(kernel, inputs, attrs, batch)
        for threads, pieces in ((1, 1), (2, 2)):
            session = open_step(kernel, inputs, attrs, batch, threads=threads, pieces=pieces)
            (got,) = native_outputs(session, batch)
            np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))
            session.close()
