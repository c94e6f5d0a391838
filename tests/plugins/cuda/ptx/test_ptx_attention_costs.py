"""What a tile of attention costs, over caches of numbers and of codes, in the PTX that nvcc makes of the kernels."""

import pytest

from ingot.dtypes import DType
from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda.ptx.costs import TILE, attention_cost, loads_per_tile

BUDGETS: dict[tuple[str, DType | None, int], int] = {  # instructions of all four warps; prefill: for 128 rows
    ("attention_decode", None, 64): 1300,
    ("attention_decode", None, 128): 1550,
    ("attention_prefill", None, 64): 2750,
    ("attention_prefill", None, 128): 4150,
    ("attention_decode", None, 512): 7000,
    ("attention_prefill", None, 512): 11500,  # for 32 rows
    ("attention_decode", DType.I8, 64): 1700,
    ("attention_decode", DType.I8, 128): 2300,
    ("attention_decode", DType.I8, 256): 3550,
    ("attention_prefill", DType.I8, 64): 4400,
    ("attention_prefill", DType.I8, 128): 6950,
    ("attention_prefill", DType.I8, 256): 7550,  # for 64 rows
    ("attention_decode", DType.F8, 64): 2050,
    ("attention_decode", DType.F8, 128): 3050,
    ("attention_decode", DType.F8, 256): 5050,
    ("attention_prefill", DType.F8, 64): 4800,
    ("attention_prefill", DType.F8, 128): 7800,
    ("attention_prefill", DType.F8, 256): 9250,
}


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "codes", "head_dim"), list(BUDGETS))
def test_a_tile_costs_no_more_instructions(nvcc: Compiler, kernel: str, codes: DType | None, head_dim: int) -> None:
    """All of K and V comes by asynchronous copies of 16 bytes. Prompts over codes make a number of each code once for
    all rows, decode makes one where it multiplies it."""
    cost, loads = attention_cost(nvcc, kernel, head_dim, codes), loads_per_tile(head_dim, codes)
    assert cost.instructions["cp"] >= loads, "the count is of a whole tile"
    assert cost.instructions.total() <= BUDGETS[kernel, codes, head_dim]
    assert cost.loading <= (21 if codes else 15) * loads
    if codes:
        pairs, each = 2 * TILE * head_dim // 64, {DType.I8: 3, DType.F8: 5}[codes]
        assert cost.converting <= (each + 1.5 * (kernel == "attention_prefill") + 0.1) * pairs
