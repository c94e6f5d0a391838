"""Step times become a budget: monotone, learned from steps, kept by the scheduler, refused where it cannot be met."""

import time
import types
from typing import Any

import numpy as np
import pytest

from ingot.configs.runtime import runtime_config
from ingot.errors import UsageError
from ingot.plan import Limits
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.request import Request
from ingot.runtime.scheduler import TpotBudget
from ingot.runtime.step_times import StepTimes, measure_step_times
from ingot.step_io import StepBatch
from tests.runtime.fake_session import FakeSession, continued
from tests.runtime.tiny_engine import make_loop

LIMITS = Limits(max_batch_size=8, max_input_len=200, max_seq_len=250, max_num_tokens=128, max_logit_rows=8)


def request_of(tokens: list[int], count: int) -> Request:
    return Request(np.array(tokens, np.int32), max_new_tokens=count)


def test_the_budget_is_the_most_tokens_that_fit() -> None:
    times = StepTimes([1, 16, 64, 128], [2.0, 4.0, 4.0, 10.0])
    assert [times.budget(ms) for ms in (1.9, 2, 3, 4, 7, 10, 99)] == [0, 1, 8, 64, 96, 128, 128]
    assert times.predict(96) == 7
    assert times.predict(1000) == 10


def test_a_longer_step_never_counts_as_a_faster_one() -> None:
    times = StepTimes([1, 16, 64], [2.0, 1.0, 8.0])
    assert times.predict(16) == 2
    assert times.budget(2.0) == 16


def test_steps_correct_the_points_beside_them_and_an_outlier_does_little() -> None:
    times = StepTimes([1, 16, 64, 128], [1.0, 2.0, 4.0, 8.0])
    times.observe(32, 1e6)
    assert times.predict(32) < 1.2 * 8 / 3
    for _ in range(200):
        times.observe(32, 6.0)
    assert times.predict(32) == pytest.approx(6, rel=0.02)
    assert times.predict(1) == 1
    for _ in range(200):
        times.observe(128, 50.0)
    assert times.predict(128) == pytest.approx(50, rel=0.02)


def test_measuring_stops_where_the_target_is_reached() -> None:
    session = FakeSession(40, 4, LIMITS)
    seen: list[int] = []

    def slow(batch: StepBatch) -> None:
        seen.append(len(batch.ids))
        time.sleep(0.001 * len(batch.ids))

    session.before_step = slow
    blocks = BlockManager((40,), 4)
    times = measure_step_times(session, blocks, LIMITS, 10.0)
    assert max(seen) <= 16
    assert 4 < times.budget(10.0) <= 10
    assert times.predict(128) > 100  # expected, not measured
    assert blocks.num_used == 0


def test_every_size_fits_the_limits() -> None:
    """More tokens than one prompt may have are spread; more than the blocks hold are scaled."""
    for shape, blocks in (
        (Limits(max_batch_size=3, max_input_len=40, max_seq_len=48, max_num_tokens=100, max_logit_rows=2), 100),
        (LIMITS, 13),
    ):
        times = measure_step_times(FakeSession(blocks, 4, shape), BlockManager((blocks,), 4), shape, 1e6)
        assert times.budget(1e6) == shape.max_num_tokens


def test_a_target_below_a_single_token_is_refused() -> None:
    session = FakeSession(40, 4, LIMITS)
    session.before_step = lambda batch: time.sleep(0.002)
    with pytest.raises(UsageError, match="single token"):
        measure_step_times(session, BlockManager((40,), 4), LIMITS, 0.5)


@pytest.mark.parametrize("target", [0, -3, float("nan"), float("inf"), "5", True])
def test_nonsense_is_refused(target: Any) -> None:
    with pytest.raises(UsageError, match="tpot_target must be"):
        runtime_config(tpot_target=target)


def test_steps_with_decode_rows_keep_the_budget() -> None:
    session = FakeSession(200, 4, LIMITS)
    tpot_budget = TpotBudget(times=StepTimes([1, 128], [1.0, 128.0]), tpot_target=30.0)
    tpot_budget.times.observe = lambda tokens, ms: None  # type: ignore[method-assign]  # the fake's own times mean nothing
    loop, _, _ = make_loop(session, LIMITS, 4, tpot_budget=tpot_budget)
    loop.add([request_of([n], 40) for n in range(4)])
    loop.step()
    late = request_of(list(range(97)) + [5] * 60, 3)
    loop.add([late])
    while not late.finished:
        loop.step()
    log = loop.step_log()
    assert log[0] == [4, 0]
    assert log[1] == [24, 4]  # 30 tokens, on tiles of 4
    assert all(prefill + decode <= 30 for prefill, decode in log[1:])
    loop.drain()
    assert late.generated().tolist() == continued(late.tokens[:157].tolist(), 3)
    alone = request_of(list(range(90, 0, -1)), 2)
    loop.add([alone])
    loop.step()
    assert loop.step_log()[-1] == [90, 0]  # nobody decodes, nobody waits for its next token


def test_prompts_advance_by_a_tile_even_if_the_target_has_no_room() -> None:
    tpot_budget = TpotBudget(times=StepTimes([1, 128], [5.0, 500.0]), tpot_target=6.0)
    loop, _, _ = make_loop(FakeSession(200, 4, LIMITS), LIMITS, 4, tpot_budget=tpot_budget)
    loop.add([request_of([n], 40) for n in range(4)])
    loop.step()
    loop.add([request_of(list(range(20)), 3)])
    loop.step()
    assert loop.step_log()[1] == [4, 4]


def test_running_steps_teach_the_table() -> None:
    session = FakeSession(200, 4, LIMITS)
    session.before_step = lambda batch: time.sleep(0.004)
    tpot_budget = TpotBudget(times=StepTimes([1, 128], [0.1, 1.0]), tpot_target=30.0)
    loop, _, _ = make_loop(session, LIMITS, 4, tpot_budget=tpot_budget)
    loop.add([request_of([1], 40)])
    loop.drain()
    assert tpot_budget.times.predict(1) > 3


def test_a_step_that_took_no_time_does_little() -> None:
    times = StepTimes([1, 16, 64, 128], [1.0, 2.0, 4.0, 8.0])
    before = times.predict(64)
    times.observe(64, 0.0)
    assert 0.85 * before < times.predict(64) < before


def test_the_best_try_counts_and_stands_for_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond a token, the first try ten times as long; the blocks hold 52 of 128 tokens."""
    now, seen = [0.0], [0]

    def slow(batch: StepBatch) -> None:
        count = len(batch.ids)
        now[0] += count * (1e-3 if count == seen[0] else 1e-2)
        seen[0] = count

    monkeypatch.setattr("ingot.runtime.step_times.time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    session = FakeSession(13, 4, LIMITS)
    session.before_step = slow
    times = measure_step_times(session, BlockManager((13,), 4), LIMITS, 1e6)
    assert [times.predict(count) for count in (1, 8, 32, 64, 128)] == pytest.approx([1, 8, 32, 64, 128])
