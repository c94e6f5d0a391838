"""What a token of a prompt costs in linear attention, in instructions of PTX."""

import pytest

from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda.ptx.costs import token_cost
from tests.spanning import often

TOKEN_BUDGETS = {"delta_prompts_128": 1150, "kda_prompts_128": 1500, "mamba_prompts_128": 820}  # of a block's warps


@pytest.mark.slow
@pytest.mark.parametrize("kernel", often(TOKEN_BUDGETS, ("mamba_prompts_128",)))
def test_a_token_of_a_prompt_costs_no_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """And passes over 32 columns of 128 numbers of the state as often as its rule says, with an instruction a warp."""
    cost, passes = token_cost(nvcc, kernel), 3 if kernel.startswith("mamba") else 4
    assert cost["fma"] + cost["mul"] >= passes * 128 * 32 // 32, "the count is of a whole token"
    assert cost.total() <= TOKEN_BUDGETS[kernel]
