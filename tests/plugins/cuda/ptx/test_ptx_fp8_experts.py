"""The PTX of the matrix products of experts with inputs in FP8, as nvcc makes it, against the references."""

from pathlib import Path

import pytest

from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.ptx.costs import FP8_EXPERTS, fp8_cost, wide_cost
from tests.plugins.cuda.ptx.launches import Interpreted
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.test_ptx_kernels import but_long
from tests.plugins.cuda.test_experts import DOWN, GATE_UP
from tests.plugins.cuda.test_fp8_experts import GROUPS, OPS, check

CASES = [(op, group) for op in OPS for group in GROUPS]
IN_CI = [(GATE_UP, 128), (DOWN, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "group"), [each if each in IN_CI else pytest.param(*each, marks=pytest.mark.long) for each in CASES]
)
def test_experts(interpreted: Interpreted, op: str, group: int) -> None:
    """In tiles of each size, some of them without rows."""
    for rows, shape, which in ((4, (36, 1100), 5), (20, (36, 304), 1), (110, (33, 40), 2)):
        check(interpreted.driver, op, group, rows, shape, which)
    assert {name for name, _ in interpreted.counted} >= {"round_to_fp8", "group_by_expert", *FP8_EXPERTS}


FAULTS = {  # what → the right text of wide_fp8.cuh, the wrong one
    "no fence behind the lines": ("      let_units_see();\n", ""),
    "scales of tiles that hold sums": ("    meet_groups<kWideThreads>();  // nobody needs the tiles any more\n", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", but_long(tuple(FAULTS), tuple(FAULTS)[:1]))
def test_faults_that_a_gpu_may_show_are_seen(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """Between the warps that turn codes, the matrix units and the warps that write sums."""
    right, wrong = FAULTS[fault]
    plant(monkeypatch, tmp_path, "wide_fp8.cuh", right, wrong)
    with pytest.raises((KernelError, AssertionError)):
        check(interpreted.driver, GATE_UP, 0, 12, (36, 1160), 5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", but_long(FP8_EXPERTS, list(FP8_EXPERTS)[:-1]))
def test_a_slab_of_experts_costs_hardly_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """Where rows lie is looked up once. Half as many matrix instructions as in bf16."""
    for group in GROUPS:
        cost, of_all = (fp8_cost(nvcc, name, group) for name in (kernel, kernel.replace("experts", "product")))
        assert cost["wgmma"] == of_all["wgmma"]
        assert cost["wgmma"] * 2 <= wide_cost(nvcc, "experts_f8_wide_128")["wgmma"]
        assert cost.total() <= 1.03 * of_all.total()
