"""The PTX of the matrix products of experts with inputs in FP8, as nvcc makes it, against the references."""

from pathlib import Path

import pytest

from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.ptx.costs import FP8_EXPERTS, fp8_cost, product_cost, wide_cost
from tests.plugins.cuda.ptx.launches import Interpreted
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.test_ptx_kernels import but_long
from tests.plugins.cuda.test_experts import DOWN, GATE_UP
from tests.plugins.cuda.test_fp8_experts import GROUPS, OPS, check
from tests.plugins.cuda.test_fp8_products import UNITS, take, units

__all__ = ["units"]  # the fixture

CASES = [(op, group) for op in OPS for group in GROUPS]
IN_CI = [(GATE_UP, 128), (DOWN, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "group"), [each if each in IN_CI else pytest.param(*each, marks=pytest.mark.long) for each in CASES]
)
def test_experts(interpreted: Interpreted, units: str, op: str, group: int) -> None:
    """In tiles of each size, some of them without rows."""
    for rows, shape, which in ((4, (36, 1100), 5), (20, (36, 304), 1), (110, (33, 40), 2)):
        check(interpreted.driver, units, op, group, rows, shape, which)
    experts = {each for each in FP8_EXPERTS if ("wide" in each) is (units == UNITS[0])}
    assert {name for name, _ in interpreted.counted} >= {"round_to_fp8", "group_by_expert", *experts}


FAULTS = {  # what → the units, the right text of their file, the wrong one
    "no fence behind the lines": (0, "      let_units_see();\n", ""),
    "scales of tiles that hold sums": (0, "    meet_groups<kWideThreads>();  // nobody needs the tiles any more\n", ""),
    "sums over tiles that warps still multiply": (1, "  __syncthreads();  // nobody needs the tiles any more\n", ""),
    "scales of a step that warps still add": (
        1,
        "copy_inputs(step + kAhead, before);",
        "copy_inputs(step + kAhead, stage);",
    ),
}
FILES = "wide_fp8.cuh", "warp_fp8.cuh"


@pytest.mark.slow
@pytest.mark.parametrize("fault", but_long(tuple(FAULTS), [tuple(FAULTS)[at] for at in (0, 2, 3)]))
def test_faults_that_a_gpu_may_show_are_seen(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """Between the warps that copy or turn codes, the matrix units and the warps that write sums."""
    which, right, wrong = FAULTS[fault]
    plant(monkeypatch, tmp_path, FILES[which], right, wrong)
    units = take(monkeypatch, UNITS[which])
    with pytest.raises((KernelError, AssertionError)):
        check(interpreted.driver, units, GATE_UP, 0, 12, (36, 1160), 5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", but_long(FP8_EXPERTS, [each for each in FP8_EXPERTS if not each.endswith("_128")]))
def test_a_slab_of_experts_costs_hardly_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """Where rows lie is looked up once. Half as many matrix instructions as in bf16."""
    for group in GROUPS:
        cost, of_all = (fp8_cost(nvcc, name, group) for name in (kernel, kernel.replace("experts", "product")))
        assert (cost["wgmma"], cost["mma"]) == (of_all["wgmma"], of_all["mma"])
        if "wide" in kernel:
            assert cost["wgmma"] * 2 <= wide_cost(nvcc, "experts_f8_wide_128")["wgmma"]
        else:
            rows = FP8_EXPERTS[kernel]
            assert cost["mma"] * 2 * max(rows, 64) == product_cost(nvcc, f"product_{max(rows, 64)}")["mma"] * rows
        assert cost.total() <= 1.03 * of_all.total()
