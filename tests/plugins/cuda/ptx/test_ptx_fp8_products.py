"""The PTX of the matrix products with inputs in FP8, as nvcc makes it, against the references."""

from pathlib import Path

import pytest

from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.ptx.costs import FP8_PRODUCTS, fp8_cost, product_cost, wide_cost
from tests.plugins.cuda.ptx.launches import Interpreted
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.test_ptx_kernels import but_long
from tests.plugins.cuda.test_fp8_products import GROUPS, UNITS, check, check_inputs, take, units

__all__ = ["units"]  # the fixture


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_products(interpreted: Interpreted, units: str, group: int) -> None:
    """Tiles of each size, and parts of K."""
    for rows, shape, which in ((3, (70, 1100, 0), 3), (17, (33, 304, 0), 2), (70, (66, 176, 1), 7)):
        check(interpreted.driver, units, group, rows, shape, which)
    products = {each for each in FP8_PRODUCTS if ("wide" in each) is (units == UNITS[0])}
    assert {name for name, _ in interpreted.counted} == {"round_to_fp8", "product_sum", *products}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "k"), [(0, 150), (128, 200)])
def test_inputs_are_rounded_as_specified(interpreted: Interpreted, units: str, group: int, k: int) -> None:
    check_inputs(interpreted.driver, units, group, k)


FAULTS = {  # what → the units, the right text of their file, the wrong one
    "lines that are still multiplied": (0, "kLineStages = 3;", "kLineStages = 2;"),
    "no fence behind the lines": (0, "      let_units_see();\n", ""),
    "x of a step that is multiplied": (
        0,
        "tiles + step % kStages * kInputs;",
        "tiles + step % (kStages - 1) * kInputs;",
    ),
    "a stage that warps multiply": (1, "copy_weight(step + kAhead, before);", "copy_weight(step + kAhead, stage);"),
    "x of a stage that warps multiply": (
        1,
        "copy_inputs(step + kAhead, before);",
        "copy_inputs(step + kAhead, stage);",
    ),
    "copies of a step that are under way": (1, "copy_wait<kAhead - 1>();", "copy_wait<kAhead>();"),
}
FILES = "wide_fp8.cuh", "warp_fp8.cuh"


@pytest.mark.slow
@pytest.mark.parametrize("fault", but_long(tuple(FAULTS), tuple(FAULTS)[1:3]))
def test_faults_that_a_gpu_may_show_are_seen(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """Between warps that copy or turn codes and those that multiply."""
    which, right, wrong = FAULTS[fault]
    plant(monkeypatch, tmp_path, FILES[which], right, wrong)
    units = take(monkeypatch, UNITS[which])
    with pytest.raises((KernelError, AssertionError)):
        check(interpreted.driver, units, 128, 12, (70, 1160, 0), 3)


BUDGETS = {
    "product_f8f8_wide_16": (500, 570),
    "product_f8f8_wide_64": (460, 590),
    "product_f8f8_wide_128": (540, 750),
    "product_f8f8_16": (320, 350),
    "product_f8f8_64": (580, 680),
    "product_f8f8_128": (790, 1010),
}
LONG = [each for each in FP8_PRODUCTS if not each.endswith("_128")]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", but_long(FP8_PRODUCTS, LONG))
def test_a_slab_costs_no_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """Of all warps of a block, without groups and with them; half as many matrix instructions as in bf16."""
    wide = "wide" in kernel
    for group, budget in zip(GROUPS, BUDGETS[kernel], strict=True):
        cost = fp8_cost(nvcc, kernel, group)
        if wide:
            assert cost["wgmma"] * 2 <= wide_cost(nvcc, "product_f8_wide_128")["wgmma"]
        else:
            rows = FP8_PRODUCTS[kernel]
            assert cost["mma"] * 2 * max(rows, 64) == product_cost(nvcc, f"product_{max(rows, 64)}")["mma"] * rows
        assert cost.total() <= budget
