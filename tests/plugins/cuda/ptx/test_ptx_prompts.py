"""The PTX of attention by warpgroups (attention_prompt), whose warps wait for each other by signals."""

from pathlib import Path
from typing import Any

import pytest

from ingot.dtypes import DType
from ingot.plugins.cuda import bind, shapes, target
from ingot.plugins.cuda.compiler import Compiler
from tests.plugins.cuda import test_paged_attention as attention
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.ptx.costs import BLOCK
from tests.plugins.cuda.ptx.launches import Interpreted
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.prompt_costs import TILE, prompt_cost


@pytest.fixture
def prompts(interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    """Prompts take the kernel of warpgroups, in two blocks, so that a block computes several pieces."""
    monkeypatch.setattr(target, "takes_warpgroups", shapes.takes_warpgroups)
    monkeypatch.setattr(bind._Binder, "_multiprocessors", lambda *given: 2)
    return interpreted


def check(prompts: Interpreted, dtype: DType, dim: int, parts: list[tuple[int, int]], **extras: Any) -> set[str]:
    """The kernels that ran."""
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "block": BLOCK, **extras}
    attention.check(prompts.driver, dtype, parts, dim=dim, **sizes)
    return {name for name, _ in prompts.counted}


ONE_TOKEN = 4 * 2.0**-8  # of a token that weighs as much as all together, see test_scores_that_rise
CASES: dict[str, tuple[DType, int, dict[str, Any]]] = {
    "64 dims": (DType.BF16, 64, {}),
    "128 dims": (DType.BF16, 128, {}),
    "float16": (DType.F16, 64, {}),
    "a window": (DType.BF16, 128, {"window": 33}),
    "sinks": (DType.BF16, 64, {"sinks": True}),
    "a soft cap": (DType.BF16, 64, {"softcap": 1.5}),
    "biases and queries that grow": (DType.BF16, 128, {"slopes": True, "growth": 0.5, "tolerance": ONE_TOKEN}),
    "scores that rise": (DType.BF16, 64, {"rise": 0.3, "tolerance": ONE_TOKEN}),
    "a group of all heads": (DType.BF16, 64, {"heads": 6, "kv_heads": 1}),
}
PARTS = [(0, 65), (600, 70), (70, 5), (0, 1)]  # more tiles than stages; pieces without rows


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_prompts_by_warpgroups(prompts: Interpreted, case: str) -> None:
    dtype, dim, extras = CASES[case]
    bent = any(each in extras for each in ("softcap", "slopes", "growth"))
    expected = {"attention_prompt_bent" if bent else "attention_prompt"}
    parts = [(0, 70), (60, 20)] if "rise" in extras else PARTS
    assert check(prompts, dtype, dim, parts, **extras) - {"attention_decode", "attention_combine"} == expected


WAIT = "signal_wait(&signals."
FAULTS = {  # what → (the right text, the wrong one, what is said of it)
    "no wait for keys": (f"{WAIT}keys_there[use.stage()], use.parity());", "", r"a race|copied|nobody wrote"),
    "no wait for values": (f"{WAIT}values_there[ring.stage()], ring.parity());", "", r"a race|copied|nobody wrote"),
    "no wait for queries": (f"{WAIT}queries_there[query_stage], query.parity());", "", r"a race|nobody wrote"),
    "keys over those that are read": (f"{WAIT}keys_done[at_stage], ring.parity() ^ 1);", "", "a race|copied"),
    "values over those that are read": (f"{WAIT}values_done[at_stage], ring.parity() ^ 1);", "", "a race|copied"),
    "queries over those that are read": (f"{WAIT}queries_done[stage], query.parity() ^ 1);", "", "a race"),
    "a wrong parity": ("ring.parity() ^ 1);\n        load(keys", "ring.parity());\n        load(keys", "for ever"),
    "a signal before copies": (
        "signal_arrive_behind_copies(&signals.values_there[at_stage]);",
        "signal_arrive(&signals.values_there[at_stage]);",
        "copied",
    ),
    "a signal that takes too few": (
        "signal_init(&signals.keys_there[i], kGroup)",
        "signal_init(&signals.keys_there[i], kGroup / 2)",
        "takes 64 more",
    ),
    "a signal that takes too many": (
        "signal_init(&signals.queries_done[i], 4 * Shape::kConsumers)",
        "signal_init(&signals.queries_done[i], 5 * Shape::kConsumers)",
        "for ever",
    ),
    "a signal before its warp is done": (
        "    __syncwarp();\n    if (threadIdx.x % kWarp == 0) signal",
        "    if (threadIdx.x % kWarp == 0) signal",
        "a race",
    ),
    "signals that are used at once": (
        "  __syncthreads();\n  if (threadIdx.x < kGroup)",
        "  if (threadIdx.x < kGroup)",
        "signal",
    ),
    "keys that units do not see": ("use.parity());\n        let_units_see();", "use.parity());", "fence.proxy.async"),
    "a turn that nobody passes on": ("        end_turn();\n        group_wait<1>", "        group_wait<1>", "for ever"),
    "values that are done too early": (
        "group_wait<0>(own.sums);\n        done(&signals.values_done[ring.stage()]);\n        ring = now;",
        "done(&signals.values_done[ring.stage()]);\n        group_wait<0>(own.sums);\n        ring = now;",
        "a race|copied",
    ),
}


IN_CI = (  # each fault is a compilation
    *("no wait for keys", "values over those that are read", "a signal before copies", "a signal that takes too few"),
    *("a signal before its warp is done", "signals that are used at once", "keys that units do not see"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.long) for each in FAULTS]
)
def test_faults_of_signals_are_seen(
    prompts: Interpreted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    right, wrong, said = FAULTS[fault]
    plant(monkeypatch, tmp_path, "prompt_attention.cuh", right, wrong)
    with pytest.raises(KernelError, match=said):
        check(prompts, DType.BF16, 64, PARTS)


BUDGETS = {  # instructions of all warps for 128 rows and a tile of tokens; the matrix units take the time of 4,096
    ("attention_prompt", 64): 3750,
    ("attention_prompt", 128): 2700,
    ("attention_prompt_bent", 64): 6650,
    ("attention_prompt_bent", 128): 4350,
}


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "head_dim"), list(BUDGETS))
def test_a_tile_costs_no_more_instructions(nvcc: Compiler, kernel: str, head_dim: int) -> None:
    """K and V come by copies of 16 bytes; a weight takes one exponent."""
    cost, tokens = prompt_cost(nvcc, kernel, head_dim), TILE[head_dim]
    assert cost["cp"] >= 2 * tokens * head_dim * 2 // 16 // 32, "the count is of a whole tile"
    assert cost["ex2"] == 128 * tokens // 32
    assert cost.total() <= BUDGETS[kernel, head_dim]
