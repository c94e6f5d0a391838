"""Steps that pipeline stages compute at once: no request in two of them, each token once, whatever leaves or fails."""

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import pytest

from ingot.errors import RankError, RequestError
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, Int32, SequenceRules, StepBatch, StepResult
from tests.runtime.fake_session import FakeSession
from tests.runtime.repeating import LIMITS, check, request_of, run_random_requests
from tests.runtime.tiny_engine import make_loop


class FakePipeline(FakeSession):
    """Checks that steps run in the order of their announcements, and that no sequence is in two of them.

    most  steps that were under way at once
    """

    def __init__(self, num_blocks: int, stages: int, states: Sequence[bool] = ()) -> None:
        windows = (0,) if not states else (0, 2)
        blocks = [num_blocks] * len(windows)
        super().__init__(blocks, 4, LIMITS, windows, states)
        self.stages, self.most = stages, 0
        self.under_way = deque[StepBatch]()
        self._started = Counter[int]()  # by slot
        self._in_steps = deque[set[tuple[int, int]]]()

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        self._started[slot] += 1
        super().start(slot, rules, tokens, num_prompt)

    def announce(self, batch: StepBatch) -> None:
        own = {(slot, self._started[slot]) for slot in batch.slots.tolist()}
        while len(self._in_steps) > len(self.under_way):
            self._in_steps.popleft()
        assert own.isdisjoint(set[tuple[int, int]]().union(*self._in_steps)), "a sequence is in two steps"
        self._in_steps.append(own)
        self.under_way.append(self._sequences.complete(batch))
        self.most = max(self.most, len(self.under_way))
        assert self.most <= self.stages

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        if not self.under_way:
            return super().run(batch, ahead)
        first = self.under_way[0]
        assert ahead is None
        for name in ("query_starts", "past_lengths", "block_tables", "logit_rows"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(first, name))
        batch = dataclasses.replace(batch, ids=first.ids)
        self.before_step(batch)
        self.under_way.popleft()
        before, self.before_step = self.before_step, lambda batch: None
        try:
            return super().run(batch)
        finally:
            self.before_step = before

    def settle(self) -> None:
        before, self.before_step = self.before_step, lambda batch: None
        while self.under_way:
            self._compute(dataclasses.replace(self.under_way.popleft(), draws=np.zeros(0, np.int32)), [])
        self.before_step = before

    def close(self) -> None:
        self.settle()
        super().close()


def make(stages: int = 2, num_blocks: int = 400) -> tuple[StepLoop, FakePipeline]:
    session = FakePipeline(num_blocks, stages)
    return make_loop(session, LIMITS, 4)[0], session


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_stage_has_a_step(stages: int) -> None:
    loop, session = make(stages)
    requests = [request_of([1, n], 20) for n in range(6)]
    loop.add(requests)
    loop.drain()
    for request in requests:
        check(request)
        assert request.num_generated == 20
    assert session.most == stages
    assert loop.work.overlapped > loop.work.steps // 2
    assert loop.work.idle_stages < loop.work.steps // 4
    assert max(rows for _, rows in loop.step_log()) == -(-6 // stages), "each step has its part of the requests"
    assert not loop.has_work


def test_one_request_alone_has_no_company() -> None:
    loop, session = make()
    loop.add([request := request_of([1, 2], 9)])
    loop.drain()
    check(request)
    assert (loop.work.overlapped, session.most) == (0, 0)
    assert loop.work.idle_stages == loop.work.steps == 9, "a stage waits for the other one in each step"


def test_a_request_that_leaves_while_its_step_is_under_way() -> None:
    loop, session = make(2)
    requests = [request_of([1, n], 20) for n in range(4)]
    loop.add(requests)
    for _ in range(5):
        loop.step()
    assert len(session.under_way) == 1
    gone = next(r for r in requests if r.slot in session.under_way[0].slots.tolist())
    loop.abort([gone])
    loop.add([late := request_of([7, 7], 12)])  # in its slot
    loop.drain()
    for request in (*(each for each in requests if each is not gone), late):
        check(request)
        assert request.num_generated == request.max_new_tokens
    check(gone)
    assert loop.stats()["blocks_used"] == 0


def test_what_is_under_way_ends_and_nothing_else_begins() -> None:
    """As before a block moves: every token that was computed counts."""
    loop, session = make(3)
    requests = [request_of([1, n], 20) for n in range(6)]
    loop.add(requests)
    for _ in range(4):
        loop.step()
    assert len(session.under_way) == 2
    before = loop.work.steps
    loop.settle()
    assert not session.under_way
    assert loop.work.steps == before + 2
    loop.settle()
    assert loop.work.steps == before + 2
    loop.drain()
    for request in requests:
        check(request)
        assert request.num_generated == 20
    assert loop.work.overlapped > loop.work.steps // 2


def test_a_fault_fails_whom_it_concerns() -> None:
    loop, session = make(2)
    requests = [request_of([1, n], 14) for n in range(4)]

    def fail(batch: StepBatch) -> None:
        if requests[1].slot in batch.slots.tolist() and requests[1].num_generated > 5:
            raise ValueError("the kernel fell over")

    session.before_step = fail
    loop.add(requests)
    loop.drain()
    assert isinstance(requests[1].error, RequestError)
    for request in requests:
        check(request)
    assert [request.num_generated for request in requests if request is not requests[1]] == [14] * 3
    assert loop.stats()["blocks_used"] == 0


def test_a_lost_rank_is_the_end() -> None:
    loop, session = make(2)
    requests = [request_of([1, n], 14) for n in range(4)]

    def lose(batch: StepBatch) -> None:
        if requests[0].num_generated > 3:
            raise RankError("rank 1 has ended")

    session.before_step = lose
    loop.add(requests)
    with pytest.raises(RankError):
        loop.drain()


@pytest.mark.daily(1)
@pytest.mark.parametrize("seed", range(8))
def test_random_requests_leave_fail_and_are_preempted(seed: int) -> None:
    rng = random.Random(seed)
    loop, session = make(rng.choice([2, 3, 4]), rng.choice([52, 60, 90]))
    run_random_requests(rng, loop, session)
    assert loop.work.overlapped > 20


def test_a_close_ends_what_is_under_way() -> None:
    loop, session = make(3)
    requests = [request_of([1, n], 30) for n in range(6)]
    loop.add(requests)
    for _ in range(5):
        loop.step()
    loop.close(RequestError("closed"))
    assert session.closed
    assert not session.under_way
    assert all(request.finished for request in requests)
