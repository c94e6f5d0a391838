"""The PTX of the matrix products of warpgroups, as nvcc makes it, against the references."""

import pytest

from tests.plugins.cuda.ptx.launches import Interpreted
from tests.plugins.cuda.test_wide_products import check
from tests.spanning import often


@pytest.mark.slow
@pytest.mark.parametrize("precision", often(("bf16", "f16", "w8", "w4g32", "w4g128"), ("bf16", "w4g32")))
def test_products_of_warpgroups(interpreted: Interpreted, precision: str) -> None:
    """Tiles of each size, and parts of K."""
    cases = ((17, (70, 520, 0), 3), (65, (66, 176, 1), 7), (130, (33, 304, 0), 2))
    for rows, shape, which in cases[:: 1 if precision == "bf16" else 2]:
        check(interpreted.driver, precision, rows, shape, which)
    kind = "product_" if precision in ("bf16", "f16") else f"product_{precision.partition('g')[0]}_"
    assert {name for name, _ in interpreted.counted} >= {
        f"{kind}wide_64",
        f"{kind}wide_{128 if kind == 'product_' else 256}",
        "product_sum",
    }
