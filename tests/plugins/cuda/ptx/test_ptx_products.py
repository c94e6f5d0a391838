"""The PTX of ingot's own matmuls, as test_ptx_kernels.py: values, the same bits in any batch, and what a slab costs."""

import functools

import pytest

from ingot.plugins.cuda import own_products
from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda import test_own_products
from tests.plugins.cuda.ptx.costs import PRODUCTS, WAYS, product_cost
from tests.plugins.cuda.ptx.launches import Interpreted
from tests.plugins.cuda.ptx.test_ptx_kernels import but_long, whole

_LATER = functools.partial(pytest.param, marks=pytest.mark.slow)
CONTAINED = ("w2t", "w3k", "w4ks", "w4t", "w8t")
OWN_TYPES = ("bf16", "f16", "w8", "w4g32", *test_own_products.KEPT_TYPES)


@pytest.mark.slow
@pytest.mark.parametrize("precision", but_long(OWN_TYPES, {*OWN_TYPES} - {"bf16", "w4ts", "f8"}))
def test_products_without_a_library(interpreted: Interpreted, precision: str) -> None:
    """Few and many rows, rows of odd sizes, and those whose copies are asynchronous."""
    test_own_products.check(interpreted.driver, precision, 2 if precision in ("bf16", "f16") else 3)
    kind = "product_" if precision in ("bf16", "f16") else f"product_{precision.partition('g')[0]}_"
    assert whole(interpreted) >= {f"{kind}{rows}" for rows in (8, 16, 64, 128)}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "which"), [((70, 300, 0), 3), _LATER((66, 176, 1), 7), _LATER((40, 1104, 0), 2)])
def test_a_row_has_the_same_bits_in_any_batch(
    interpreted: Interpreted, shape: tuple[int, int, int], which: int
) -> None:
    test_own_products.check_bits(interpreted.driver, "bf16", shape, which)
    assert whole(interpreted) >= {"product_8", "product_16", "product_64", "product_128"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", but_long(test_own_products.KEPT_TYPES, [each for each in CONTAINED if each != "w4t"])
)
def test_kept_codes_are_the_numbers_of_the_specification(interpreted: Interpreted, precision: str) -> None:
    """To the bit, in few rows and in many."""
    for rows in (3, 20):
        test_own_products.check_numbers(interpreted.driver, precision, rows)
    assert whole(interpreted) == {"epilogue", f"product_{precision}_8", f"product_{precision}_64"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w4t", "w4ts"])
def test_numbers_of_whole_pairs(interpreted: Interpreted, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two panels, which may have different ways to their numbers."""
    monkeypatch.setattr(own_products, "HALF_PAIRS", 0)
    test_own_products.check_numbers(interpreted.driver, precision, 3)


@pytest.mark.slow
def test_a_row_of_codes_has_the_same_bits_in_any_batch(interpreted: Interpreted) -> None:
    test_own_products.check_bits(interpreted.driver, "w4g64", (70, 1104, 1), 7)
    assert whole(interpreted) >= {"product_w4_8", "product_w4_16", "product_w4_64", "product_w4_128"}


SLAB_BUDGETS = {  # of a block's warps
    **{"product_8": 75, "product_16": 95, "product_64": 620, "product_128": 840},
    **{"product_w8_8": 102, "product_w8_16": 108, "product_w8_64": 1050, "product_w8_128": 1230},
    **{"product_w4_8": 95, "product_w4_16": 100, "product_w4_64": 1320, "product_w4_128": 1490},
    **{"product_w4t_8": 115, "product_w4t_16": 120, "product_w4t_64": 1800, "product_w4t_128": 1880},
    **{"product_w4ts_8": 130, "product_w4ts_16": 136, "product_w4ts_64": 2130, "product_w4ts_128": 2290},
    **{"product_w2t_8": 96, "product_w2t_16": 108, "product_w2t_64": 1290, "product_w2t_128": 1430},
    **{"product_w3t_8": 143, "product_w3t_16": 157, "product_w3t_64": 1700, "product_w3t_128": 1840},
    **{"product_w2ks_8": 202, "product_w2ks_16": 214, "product_w2ks_64": 1915, "product_w2ks_128": 2133},
    **{"product_w3k_8": 257, "product_w3k_16": 274, "product_w3k_64": 2100, "product_w3k_128": 2326},
    **{"product_w4ks_8": 286, "product_w4ks_16": 292, "product_w4ks_64": 2234, "product_w4ks_128": 2461},
    **{"product_w5ks_8": 324, "product_w5ks_16": 331, "product_w5ks_64": 2503, "product_w5ks_128": 2730},
    **{"product_w6k_8": 250, "product_w6k_16": 271, "product_w6k_64": 2184, "product_w6k_128": 2310},
    **{"product_w8t_8": 185, "product_w8t_16": 193, "product_w8t_64": 1400, "product_w8t_128": 1620},
    **{"product_w8ts_8": 282, "product_w8ts_16": 288, "product_w8ts_64": 1830, "product_w8ts_128": 2050},
    **{"product_f8_8": 255, "product_f8_16": 262, "product_f8_64": 2010, "product_f8_128": 2230},
}
WAY_BUDGETS = {  # kernel, columns of a group, panels
    ("product_w4_8", 32, "in order"): 128,
    ("product_w2t_8", 32, "in order"): 142,
    ("product_w3t_8", 32, "in order"): 217,
    ("product_w6k_8", 16, "in order"): 250,
    ("product_w4t_8", 32, "in order"): 151,
    ("product_w4t_8", 16, "short scales"): 135,
    ("product_w4t_8", 32, "short scales"): 135,
    ("product_w4t_8", 32, "others"): 237,
    ("product_w4ts_8", 32, "in order"): 181,
    ("product_w4ts_8", 32, "offsets"): 234,
    ("product_w4ts_8", 128, "offsets"): 206,
    ("product_w4ts_8", 128, "others"): 332,
    ("product_f8_8", 0, "in order"): 128,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", but_long(SLAB_BUDGETS, [each for each in SLAB_BUDGETS if each.split("_")[1] in CONTAINED])
)
def test_a_slab_of_a_product_costs_no_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """And takes no matrix instruction more than its rows need: one for 16 rows of the weight, 8 of x, 16 of K."""
    cost, rows = product_cost(nvcc, kernel), PRODUCTS[kernel]
    assert cost["mma"] == (2 if rows <= 16 else 8) * (rows // 8) * 2
    assert cost.total() <= SLAB_BUDGETS[kernel]


@pytest.mark.slow
@pytest.mark.parametrize("case", WAYS)
def test_a_slab_of_other_codes_costs_no_more_instructions(nvcc: Compiler, case: tuple[str, int, str]) -> None:
    assert product_cost(nvcc, *case).total() <= WAY_BUDGETS[case]
