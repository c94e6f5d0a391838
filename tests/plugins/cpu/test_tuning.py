"""Tactics of matrix products: every way gives the same bits, and the native module can time it."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Attr
from ingot.plugins.cpu.native import detect_isa, kernel_table
from ingot.plugins.cpu.target import TARGETS
from ingot.plugins.layouts import panel_bytes
from ingot.plugins.op import Array
from ingot.plugins.target import Product, Tunable
from tests.plugins.cpu.one_step import Input, Packed, Quantised, activations_of, native_outputs, open_step, plain_batch
from tests.plugins.ops.calls import group_of, random_rows, random_weight
from tests.spanning import isa, precision, spanning

pytestmark = pytest.mark.native

KERNELS = [name for name in kernel_table() if name.startswith("matmul.")]
ROWS = (1, 4, 8, 20, 33, 230)
WAYS = {name: 5 if ".amx" in name else 2 for name in KERNELS}


@functools.lru_cache(maxsize=1)  # packed once for all runs of a test
def _case(kernel: str, n: int, k: int, rows: int = max(ROWS)) -> tuple[list[Input], dict[str, Attr]]:
    dtype = kernel.split(".")[1]
    x = np.random.default_rng(n).standard_normal((rows, k)).astype(np.float32)
    group = group_of(dtype)
    weight = (
        Quantised.of(random_weight(dtype, n, k, group), gated=True)
        if DType(dtype.removesuffix("a8")).is_quantised
        else Packed(values=random_rows(n, k).values, dtype=DType(dtype), panels=True, gated=True)
    )
    attrs: dict[str, Attr] = {"activation": "silu", "gated": 1, "activations": activations_of(kernel), "group": group}
    return [x, weight, None, None], attrs


def _run(kernel: str, rows: int, tactics: str | None, threads: int) -> Array:
    inputs, attrs = _case(kernel, 600, 150)
    session = open_step(kernel, inputs, attrs, plain_batch(max(ROWS)), threads=threads, tactics=tactics)
    (y,) = native_outputs(session, plain_batch(rows))
    session.close()
    return y


@pytest.mark.daily(1)
@pytest.mark.parametrize("kernel", spanning(KERNELS, precision, isa))
def test_tactics_never_change_a_bit(kernel: str) -> None:
    whole = _run(kernel, max(ROWS), None, 2)
    for rows in ROWS:
        for tactics, threads in (("1111", 1), ("1111", 3), ("0000", 2)):
            assert _run(kernel, rows, tactics, threads).tobytes() == whole[:rows].tobytes(), f"{rows} rows"


@pytest.mark.parametrize("kernel", spanning(KERNELS, precision, isa))
def test_tactics_change_how_the_work_is_cut(kernel: str) -> None:
    """Few rows pass over panels of their own, or take blocks in turn; one class has no say in another."""
    inputs, attrs = _case(kernel, 300, 40)
    taken = {}
    for tactics in ("1000", "0111"):
        session = open_step(kernel, inputs, attrs, plain_batch(max(ROWS)), tactics=tactics)
        native_outputs(session, plain_batch(1))
        (taken[tactics],) = session.native.items_taken()
        session.close()
    assert taken["1000"] > 0 == taken["0111"]


@pytest.mark.daily(5)
@pytest.mark.parametrize(
    ("kernel", "shape"),
    spanning(
        itertools.product(
            [name for name in KERNELS if WAYS[name] > 2], ((40, 70, 150), (75, 330, 1300), (300, 34, 5700))
        ),
        precision,
        isa,
        lambda kernel, shape: (kernel.endswith("a8"), shape),
    ),
)
def test_ways_over_k_never_change_a_bit(kernel: str, shape: tuple[int, int, int]) -> None:
    """Parts of K, small ones, and epilogues of their own: of a part of one step or many, and of sums that stay."""
    rows, n, k = shape
    inputs, attrs = _case(kernel, n, k, rows)
    batch = plain_batch(rows)
    (whole,) = native_outputs(open_step(kernel, inputs, attrs, batch), batch)
    for tactic in range(1, WAYS[kernel]):
        for threads in (1, 3):
            session = open_step(kernel, inputs, attrs, batch, threads=threads, tactics=f"000{tactic}")
            (y,) = native_outputs(session, batch)
            session.close()
            assert y.tobytes() == whole.tobytes(), f"tactic {tactic}"


@pytest.mark.parametrize("kernel", ["matmul.w8a8.avx2", "matmul.bf16.amxemu"])
@pytest.mark.parametrize("tactics", ["", "000", "000{}", "00000"])
def test_tactics_that_are_none_are_refused(kernel: str, tactics: str) -> None:
    with pytest.raises(EngineError, match=f"four digits, each below {WAYS[kernel]}"):
        _run(kernel, 1, tactics.format(WAYS[kernel]), 1)


def _avx2() -> Tunable:
    target = next(each for each in TARGETS if each.name == "cpu/avx2")
    assert isinstance(target, Tunable)
    return target


@pytest.mark.skipif(detect_isa() == "none", reason="this machine lacks avx2")
@pytest.mark.parametrize("dtype", ["f32", "w4a8"])
def test_products_are_timed(dtype: str) -> None:
    target = _avx2()
    assert "avx" in target.machine() or "amx" in target.machine()
    group = 32 if dtype == "w4a8" else 0
    product = Product(
        kernel=f"matmul.{dtype}.avx2",
        n=64,
        k=100,
        group=group,
        gated=True,
        panel_bytes=panel_bytes(100, DType.W4 if group else DType.F32, group),
    )
    for rows in (1, 40):
        for tactic in range(len(target.tactics(product, rows))):
            assert 0 < target.time_product(product, rows, tactic) < 1


@pytest.mark.skipif(detect_isa() == "none", reason="this machine lacks avx2")
@pytest.mark.parametrize("dtype", ["bf16", "w4a8"])
@pytest.mark.parametrize("op", ["moe_gate_up", "moe_down"])
def test_products_of_experts_are_timed(op: str, dtype: str) -> None:
    group = 32 if dtype == "w4a8" else 0
    product = Product(
        kernel=f"{op}.{dtype}.avx2",
        n=64,
        k=100,
        group=group,
        gated=op == "moe_gate_up",
        panel_bytes=panel_bytes(100, DType.W4 if group else DType.BF16, group),
        experts=5,
        slots=3,
    )
    for rows in (1, 40):
        ways = len(_avx2().tactics(product, rows))
        for tactic in range(ways):
            assert 0 < _avx2().time_product(product, rows, tactic) < 1
        with pytest.raises(ValueError, match="no product that could be timed"):
            _avx2().time_product(product, rows, ways)
    for experts, slots in ((5, 6), (70_000, 3)):
        with pytest.raises(ValueError, match="no product that could be timed"):
            _avx2().time_product(dataclasses.replace(product, experts=experts, slots=slots), 1, 0)
