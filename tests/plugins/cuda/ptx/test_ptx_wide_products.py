"""The PTX of the matrix products of warpgroups, as nvcc makes it, against the references."""

from pathlib import Path

import pytest

from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda import test_wide_experts
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.ptx.costs import WIDE_PRODUCTS, WIDE_WAYS, wide_cost
from tests.plugins.cuda.ptx.launches import Interpreted
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.test_ptx_kernels import but_long
from tests.plugins.cuda.ptx.test_ptx_products import CONTAINED
from tests.plugins.cuda.test_experts import DOWN, GATE_UP
from tests.plugins.cuda.test_own_products import KEPT_TYPES, check_numbers
from tests.plugins.cuda.test_wide_products import check


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    but_long(("bf16", "f16", "w8", "w4g32", "w4g128", *KEPT_TYPES), ("f16", "w8", "w8ts", "w4ts", *CONTAINED)),
)
def test_products_of_warpgroups(interpreted: Interpreted, precision: str) -> None:
    """Tiles of each size, and parts of K."""
    cases = ((17, (70, 520, 0), 3), (65, (66, 176, 1), 7), (130, (33, 304, 0), 2))
    for rows, shape, which in cases[:: 1 if precision in ("bf16", *KEPT_TYPES) else 2]:
        check(interpreted.driver, precision, rows, shape, which)
    kind = "product_" if precision in ("bf16", "f16") else f"product_{precision.partition('g')[0]}_"
    if precision in KEPT_TYPES:
        assert f"{kind}wide_128" in {name for name, _ in interpreted.counted}
    assert {name for name, _ in interpreted.counted} >= {
        f"{kind}wide_64",
        f"{kind}wide_{128 if kind == 'product_' else 256}",
        "product_sum",
    }


@pytest.mark.slow
@pytest.mark.parametrize("precision", but_long(KEPT_TYPES, [each for each in CONTAINED if each != "w4t"]))
def test_kept_codes_are_the_numbers_of_the_specification(interpreted: Interpreted, precision: str) -> None:
    """To the bit."""
    check_numbers(interpreted.driver, precision, 20, "sm90a")
    assert f"product_{precision}_wide_64" in {name for name, _ in interpreted.counted}


EXPERTS = [(op, each) for op in (GATE_UP, DOWN) for each in test_wide_experts.WIDE]
IN_CI = [(GATE_UP, "bf16"), (DOWN, "w4g32")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "precision"), [each if each in IN_CI else pytest.param(*each, marks=pytest.mark.long) for each in EXPERTS]
)
def test_experts_of_warpgroups(interpreted: Interpreted, op: str, precision: str) -> None:
    """In tiles of both sizes, some of them without rows."""
    for rows, shape, which in ((20, (72, 304), 5), (110, (33, 520), 2)):
        test_wide_experts.check(interpreted.driver, op, precision, rows, shape, which)
    kind = "" if precision in ("bf16", "f16") else f"{precision.partition('g')[0]}_"
    seen = {name for name, _ in interpreted.counted}
    assert seen >= {"group_by_expert", f"experts_{kind}wide_64", f"experts_{kind}wide_128"}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["experts_wide_128", "experts_w4ts_wide_64"])
def test_a_slab_of_experts_costs_hardly_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """Where rows lie is looked up once."""
    cost, of_all = (wide_cost(nvcc, name) for name in (kernel, kernel.replace("experts", "product")))
    assert cost["wgmma"] == of_all["wgmma"]
    assert cost["ld"] == of_all["ld"]
    assert cost.total() <= 1.03 * of_all.total()


FAULTS = {  # what → the right text of wide_kept.cuh, the wrong one
    "numbers that are still read": ("kNumberStages = 3;", "kNumberStages = 2;"),
    "no fence behind the numbers": ("      let_units_see();\n", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_a_gpu_may_show_are_seen(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """Between the warps that make numbers and the matrix units."""
    right, wrong = FAULTS[fault]
    plant(monkeypatch, tmp_path, "wide_kept.cuh", right, wrong)
    with pytest.raises(KernelError):
        check(interpreted.driver, "w4ts", 20, (70, 520, 0), 3)


SLAB_BUDGETS = {  # of a block's warps
    **{"product_w4t_wide_64": 1095, "product_w4t_wide_128": 943, "product_w4t_wide_256": 975},
    **{"product_w2t_wide_64": 940, "product_w2t_wide_128": 781, "product_w2t_wide_256": 815},
    **{"product_w3t_wide_64": 1080, "product_w3t_wide_128": 918, "product_w3t_wide_256": 950},
    **{"product_w2ks_wide_64": 903, "product_w2ks_wide_128": 942, "product_w2ks_wide_256": 974},
    **{"product_w3k_wide_64": 1205, "product_w3k_wide_128": 1245, "product_w3k_wide_256": 1276},
    **{"product_w4ks_wide_64": 1264, "product_w4ks_wide_128": 1304, "product_w4ks_wide_256": 1335},
    **{"product_w5ks_wide_64": 1339, "product_w5ks_wide_128": 1394, "product_w5ks_wide_256": 1425},
    **{"product_w6k_wide_64": 1362, "product_w6k_wide_128": 1234, "product_w6k_wide_256": 1266},
    **{"product_w4ts_wide_64": 1095, "product_w4ts_wide_128": 955, "product_w4ts_wide_256": 985},
    **{"product_w8t_wide_64": 1250, "product_w8t_wide_128": 1140, "product_w8t_wide_256": 1170},
    **{"product_w8ts_wide_64": 1550, "product_w8ts_wide_128": 1430, "product_w8ts_wide_256": 1460},
    **{"product_f8_wide_64": 1510, "product_f8_wide_128": 1330, "product_f8_wide_256": 1360},
}
WAY_BUDGETS = dict(zip(WIDE_WAYS, (931, 1279, 1603), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", WIDE_WAYS)
def test_a_slab_of_other_codes_costs_no_more_instructions(nvcc: Compiler, case: tuple[str, str]) -> None:
    assert wide_cost(nvcc, *case).total() <= WAY_BUDGETS[case]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", but_long(SLAB_BUDGETS, [each for each in SLAB_BUDGETS if each.split("_")[1] in CONTAINED])
)
def test_a_slab_of_kept_codes_costs_no_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """And takes no matrix instruction more than floats do. Numbers are stored eight at a time."""
    cost, (_, rows) = wide_cost(nvcc, kernel), WIDE_PRODUCTS[kernel]
    floats = wide_cost(nvcc, f"product_wide_{min(rows, 128)}")
    assert cost["wgmma"] == floats["wgmma"]
    assert cost["st"] == 128 * 32 // 8 // 32
    assert cost.total() <= SLAB_BUDGETS[kernel]
