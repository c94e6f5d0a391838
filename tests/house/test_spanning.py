"""What is left of many cases still shows each thing that all of them show."""

import itertools
from typing import Any

import pytest

from tests.spanning import isa, precision, spanning

KERNELS = [f"matmul.{dtype}.{level}" for dtype in ("w8", "w8a8", "w4a8") for level in ("amx", "avx2", "avx512emu")]


def _split(cases: list[Any]) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """(of every day, slow)"""
    daily, slow = list[tuple[object, ...]](), list[tuple[object, ...]]()
    for case in cases:
        (slow if pytest.mark.slow in case.marks else daily).append(case.values)
    return daily, slow


def test_everything_that_is_said_of_any_case_is_said_of_a_daily_one() -> None:
    daily, slow = _split(spanning(itertools.product(KERNELS, (1, 2)), precision, lambda name, rows: (isa(name), rows)))
    assert {*daily, *slow} == set(itertools.product(KERNELS, (1, 2)))
    assert len(slow) >= 6
    assert {precision(str(name)) for name, _ in daily} == {"matmul.w8", "matmul.w8a8", "matmul.w4a8"}
    assert len({(isa(str(name)), rows) for name, rows in daily}) == 12


def test_an_emulated_kernel_is_chosen_with_the_one_that_it_stands_in_for() -> None:
    pair = ["matmul.w8.avx512", "matmul.w8.avx512emu"]
    daily, slow = _split(spanning([*pair, "matmul.w8.amx"], precision))
    assert daily == [(each,) for each in pair]
    assert slow == [("matmul.w8.amx",)]


def test_ids_tell_the_values() -> None:
    case: Any = spanning([("matmul.w8.amx", (20, 300))], precision)[0]
    assert case.id == "matmul.w8.amx-20-300"
