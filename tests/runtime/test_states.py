"""Layers with states: slots, snapshots, steps that fail or are interrupted. The states are the tokens themselves."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from ingot.configs.runtime import Policy
from ingot.errors import RequestError
from ingot.plan import STATE_SLOTS, STATE_WINDOW, Limits
from ingot.runtime.block_manager import BlockManager, Hits
from ingot.runtime.block_table import BlockTable
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import StepBatch
from tests.runtime.fake_session import FakeSession, RepeatingSession, continued
from tests.runtime.tiny_engine import make_loop
from tests.spanning import pairs, spanning

SIZE = 4
LIMITS = Limits(max_batch_size=5, max_input_len=40, max_seq_len=80, max_num_tokens=16, max_logit_rows=5)
WINDOWS, STATES, STRIDES = (0, STATE_WINDOW), (False, True), (0, 2)


def make(
    session: type[FakeSession], slots: int, policy: Policy = Policy.MAX_UTILIZATION, blocks: int = 60
) -> tuple[StepLoop, Scheduler, FakeSession]:
    made = session((blocks, slots), SIZE, LIMITS, WINDOWS, STATES)
    loop, scheduler, _ = make_loop(made, LIMITS, SIZE, policy, windows=WINDOWS, strides=STRIDES)
    return loop, scheduler, made


def request_of(prompt: Sequence[int], count: int) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count)


def check(request: Request, count: int) -> None:
    assert request.error is None
    assert request.generated().tolist() == continued(request.tokens[: request.num_prompt].tolist(), count)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("session", "policy", "slots"),
    spanning(itertools.product([FakeSession, RepeatingSession], Policy, [STATE_SLOTS, 7, 40]), *pairs(3)),
)
def test_random_requests_end_with_their_tokens(session: type[FakeSession], policy: Policy, slots: int) -> None:
    rng = random.Random(slots)
    loop, scheduler, _ = make(session, slots, policy, blocks=20)
    live: list[tuple[Request, int]] = []
    for _ in range(60):
        head = [rng.randrange(2)] * rng.randrange(1, 24)
        request = request_of([*head, *(rng.randrange(9) for _ in range(rng.randrange(6)))], rng.randrange(1, 30))
        loop.add([request])
        live.append((request, request.max_new_tokens))
        for _ in range(rng.randrange(4)):
            loop.step()
        if rng.random() < 0.1:
            loop.abort([rng.choice(live)[0]])
    loop.drain()
    for request, count in live:
        if request.finish_reason is not FinishReason.ABORT:
            check(request, count)
    assert loop.stats()["blocks_used"] == 0
    assert (scheduler.prefix_hit_tokens > 0) == (slots > STATE_SLOTS)


@pytest.mark.daily(23)
@pytest.mark.parametrize("token", range(1, 30))
def test_preemption_at_any_token_begins_at_the_last_snapshot(token: int) -> None:
    loop, scheduler, _ = make(FakeSession, 9)
    request = request_of(range(21), 30)
    loop.add([request])
    while request.num_generated < token:
        loop.step()
    before = request.num_computed
    scheduler.preempt([request])
    loop.step()
    assert before // SIZE * SIZE == before - scheduler.preempted_tokens, "of blocks that are full nothing is lost"
    loop.drain()
    check(request, 30)


def test_a_failing_request_fails_alone_and_others_go_on_with_their_states() -> None:
    loop, _, session = make(FakeSession, 20)
    bad = continued([7, 7], 20)[9]

    def fail(batch: StepBatch) -> None:
        if bad in batch.ids and len(batch.ids) < 20:
            raise ValueError("the kernel fell over")

    session.before_step = fail
    requests = [request_of([7, 7], 30), *(request_of([1, n], 30) for n in range(3))]
    loop.add(requests)
    loop.drain()
    assert isinstance(requests[0].error, RequestError)
    for request in requests:
        tokens = continued(request.tokens[:2].tolist(), 30)
        assert (request.error is not None) == (bad in tokens[:-1])
        assert request.generated().tolist() == (tokens[: tokens.index(bad) + 1] if request.error else tokens)
    assert loop.stats()["blocks_used"] == 0


def test_a_step_that_failed_once_loses_nothing() -> None:
    loop, _, session = make(FakeSession, 20)
    requests = [request_of([1, n], 20) for n in range(3)]
    loop.add(requests)
    for _ in range(9):
        loop.step()

    def fail(batch: StepBatch) -> None:
        session.before_step = lambda batch: None
        raise ValueError("once")

    session.before_step = fail
    loop.drain()
    for request in requests:
        check(request, 20)


def test_an_interrupted_step_begins_again_at_the_last_snapshot() -> None:
    loop, scheduler, session = make(FakeSession, 20)
    request = request_of([1, 2], 20)
    loop.add([request])
    for _ in range(9):
        loop.step()

    def interrupt(batch: StepBatch) -> None:
        raise KeyboardInterrupt

    session.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    assert scheduler.waiting == [request], "what its state has become is unknown"
    session.before_step = lambda batch: None
    loop.drain()
    check(request, 20)


def test_a_chunk_leaves_no_snapshots_in_one_that_is_under_way() -> None:
    """Whose step begins before there is a slot, and writes none."""
    manager, tokens = (
        BlockManager((60, 2 * STATE_SLOTS), 2, windows=WINDOWS, strides=(0, 3)),
        np.arange(40, dtype=np.int32),
    )
    tables = BlockTable(), BlockTable(b"other")
    for table in tables:
        assert manager.start(table, Hits(count=0, blocks=([], [])), tokens, 39)
    manager.cover(tables[0], 20)
    assert tables[0].held(1) == tables[0].ids[1, 9:10].tolist(), "the other one claims the rest"
    manager.release(tables[1])
    manager.cover(tables[0], 22)
    assert np.flatnonzero(tables[0].ids[1] >= 0).tolist() == [9, 10]
