"""The PTX of the matrix products with inputs in FP8, as nvcc makes it, against the references."""

from pathlib import Path

import pytest

from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.ptx.costs import FP8_PRODUCTS, fp8_cost, wide_cost
from tests.plugins.cuda.ptx.launches import Interpreted
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.test_ptx_kernels import but_long
from tests.plugins.cuda.test_fp8_products import GROUPS, check, check_inputs


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_products(interpreted: Interpreted, group: int) -> None:
    """Tiles of each size, and parts of K."""
    for rows, shape, which in ((3, (70, 1100, 0), 3), (17, (33, 304, 0), 2), (70, (66, 176, 1), 7)):
        check(interpreted.driver, group, rows, shape, which)
    assert {name for name, _ in interpreted.counted} == {"round_to_fp8", "product_sum", *FP8_PRODUCTS}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "k"), [(0, 150), (128, 200)])
def test_inputs_are_rounded_as_specified(interpreted: Interpreted, group: int, k: int) -> None:
    check_inputs(interpreted.driver, group, k)


FAULTS = {  # what → the right text of wide_fp8.cuh, the wrong one
    "lines that are still multiplied": ("kLineStages = 3;", "kLineStages = 2;"),
    "no fence behind the lines": ("      let_units_see();\n", ""),
    "x of a step that is multiplied": ("tiles + step % kStages * kInputs;", "tiles + step % (kStages - 1) * kInputs;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", but_long(tuple(FAULTS), tuple(FAULTS)[1:]))
def test_faults_that_a_gpu_may_show_are_seen(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """Between the warps that turn codes and the matrix units."""
    right, wrong = FAULTS[fault]
    plant(monkeypatch, tmp_path, "wide_fp8.cuh", right, wrong)
    with pytest.raises((KernelError, AssertionError)):
        check(interpreted.driver, 128, 12, (70, 1160, 0), 3)


BUDGETS = {"product_f8f8_wide_16": (500, 570), "product_f8f8_wide_64": (460, 590), "product_f8f8_wide_128": (540, 750)}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", but_long(FP8_PRODUCTS, list(FP8_PRODUCTS)[:-1]))
def test_a_slab_costs_no_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """Of all warps of a block, without groups and with them; half as many matrix instructions as in bf16."""
    for group, budget in zip(GROUPS, BUDGETS[kernel], strict=True):
        cost = fp8_cost(nvcc, kernel, group)
        assert cost["wgmma"] * 2 <= wide_cost(nvcc, "product_f8_wide_128")["wgmma"]
        assert cost.total() <= budget
