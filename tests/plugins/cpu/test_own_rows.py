"""Rows that every thread prepares for itself, and rows that the team prepares together: the same bits."""

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.op import Array
from tests.plugins.cpu.one_step import Input, Packed, Quantised, activations_of, native_outputs, open_step, plain_batch
from tests.plugins.ops.calls import group_of, random_weight

pytestmark = pytest.mark.native

KERNELS = [name for name in kernel_table() if name.startswith("matmul.") and activations_of(name) != "f32"]
OWN_ELEMENTS = 16384  # kPrivateRowElements of plugins/include/ingot/kernel.h
K = 2300
FEW, MANY = OWN_ELEMENTS // K, OWN_ELEMENTS // K + 1


def _case(kernel: str) -> tuple[list[Input], dict[str, Attr]]:
    weight_type, rounded = kernel.split(".")[1], activations_of(kernel)
    group = group_of(weight_type)
    dtype = DType(weight_type.removesuffix("a8"))
    if dtype.is_quantised:
        weight: Packed = Quantised.of(random_weight(weight_type, 20, K, group))
    else:
        values = np.random.default_rng(1).standard_normal((20, K)).astype(np.float32)
        weight = Packed(values=values, dtype=dtype, panels=True)
    x = np.random.default_rng(2).standard_normal((MANY, K)).astype(np.float32)
    return [x, weight, None, None], {"activation": "none", "gated": 0, "activations": rounded, "group": group}


def _run(kernel: str, rows: int, threads: int, tactics: str) -> tuple[Array, int]:
    """The product's rows, and how often the threads waited: once at the end of a step, and for rows of the team."""
    inputs, attrs = _case(kernel)
    session = open_step(kernel, inputs, attrs, plain_batch(MANY), threads=threads, tactics=tactics)
    (y,) = native_outputs(session, plain_batch(rows))
    session.run(plain_batch(rows))
    barriers = session.native.barriers
    session.close()
    return y, barriers


@pytest.mark.daily(12)
@pytest.mark.parametrize("kernel", KERNELS)
def test_whoever_rounds_rows_gives_the_same_bits(kernel: str) -> None:
    whole, barriers = _run(kernel, MANY, 2, "0000")
    assert barriers == 2
    for threads, tactics in ((1, "0000"), (2, "1111"), (5, "0000"), (16, "0000")):
        for rows in (1, FEW):
            part, barriers = _run(kernel, rows, threads, tactics)
            assert barriers == 1
            assert part.tobytes() == whole[:rows].tobytes(), f"{rows} rows on {threads} threads"
