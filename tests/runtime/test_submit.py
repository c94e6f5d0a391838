"""Steps that are submitted while the step before them computes: the same tokens, even if others end, leave or fail."""

import random
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.runtime.logits_rules import Rules
from ingot.runtime.request import FinishReason, ReasoningRules, Request
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import StepBatch
from tests.runtime.fake_session import SubmittingSession, continued
from tests.runtime.repeating import LIMITS, check, request_of, run_random_requests
from tests.runtime.tiny_engine import make_loop


def make(num_blocks: int = 400) -> tuple[StepLoop, SubmittingSession]:
    session = SubmittingSession(num_blocks, 4, LIMITS)
    return make_loop(session, LIMITS, 4)[0], session


def test_decode_steps_are_submitted_ahead() -> None:
    loop, session = make()
    requests = [request_of([1, n], 20) for n in range(3)]
    loop.add(requests)
    loop.drain()
    for request in requests:
        check(request)
        assert request.num_generated == 20
    assert session.followed == 19, "of 20 steps, the first follows nobody"
    assert loop.work.steps == 20
    assert not loop.has_work


def test_ends_leave_no_step_without_overlap() -> None:
    """Whether they are known before, or a stop token says so while the step after computes."""
    loop, session = make()
    prompt = [5, 9]
    stops = request_of(prompt, 40, frozenset(continued(prompt, 3)[-1:]))
    requests = [stops, *[request_of([1, n], count) for n, count in enumerate((2, 5, 20))]]
    loop.add(requests)
    loop.drain()
    assert [request.num_generated for request in requests[1:]] == [2, 5, 20]
    assert stops.finish_reason is FinishReason.STOP
    for request in requests:
        check(request)
    assert (loop.work.steps, session.followed) == (20, 19)


def test_an_arrival_leaves_one_step_without_overlap() -> None:
    loop, session = make()
    loop.add([first := request_of([1, 2], 20)])
    for _ in range(5):
        loop.step()
    loop.add([second := request_of([3, 4], 8)])
    loop.drain()
    for request in (first, second):
        check(request)
    assert (loop.work.steps, session.followed) == (20, 18)


def test_a_waiting_request_starts_when_another_one_ends() -> None:
    """The step after is not begun without it where the end is known before."""
    loop, _ = make()
    most = LIMITS.max_batch_size
    loop.add([request_of([1, n], 5 + 20 * (n > 0)) for n in range(most)])
    loop.add([late := request_of([2, 3], 4)])
    for _ in range(6):
        loop.step()
    assert late.num_generated == 1
    loop.drain()
    check(late)


def test_a_long_prompt_is_waited_for() -> None:
    """Nobody decodes ahead while a part of it is left: the scheduler decides how much comes next."""
    loop, session = make()
    loop.add([request_of([1, 2], 30)])
    loop.step()
    long = request_of([n % 7 for n in range(2 * LIMITS.max_num_tokens)], 3)
    loop.add([long])
    loop.step()
    before = session.followed
    while not long.num_generated:
        loop.step()
        assert session.followed - before <= 1
    loop.drain()
    check(long)


def test_a_sequence_that_ends_costs_nothing_in_the_step_after() -> None:
    """It was submitted already; its blocks and its slot go to a request that came meanwhile."""
    loop, session = make(24)
    prompt = [5, 9]
    stop = continued(prompt, 7)
    requests = [request_of(prompt, 40, frozenset(stop[-1:])), request_of([1, 2], 40)]
    late = request_of([8] * 30, 10)
    loop.add(requests)
    while not requests[0].finished:
        loop.step()
    assert loop.has_work
    loop.add([late])
    loop.drain()
    assert requests[0].generated().tolist() == stop[: stop.index(stop[-1]) + 1]
    assert requests[0].finish_reason is FinishReason.STOP
    for request in (requests[1], late):
        check(request)
        assert request.num_generated == request.max_new_tokens
    assert loop.stats()["blocks_used"] == 0
    assert session.followed > 20


def test_the_last_step_ends_where_all_have_ended() -> None:
    loop, session = make()
    prompt = [5, 9]
    request = request_of(prompt, 40, frozenset(continued(prompt, 3)[-1:]))
    loop.add([request])
    loop.drain()
    assert request.finished
    assert not loop.has_work
    loop.add([late := request_of([5, 8], 4)])
    loop.drain()
    check(late)
    assert session.followed > 0


@pytest.mark.parametrize(
    ("given", "followed"),
    [
        ({"rules": Rules(bad_words=((3, 4),))}, False),
        ({"rules": Rules(bad_words=((3,),))}, True),
        ({"reasoning": ReasoningRules(end=(200,), budget=30)}, False),
    ],
)
def test_words_and_reasoning_are_waited_for(
    given: dict[str, Any], followed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop, session = make()
    loop.add([Request(np.array([1], np.int32), max_new_tokens=12, **given)])
    loop.drain()
    assert (session.followed > 0) == followed
    assert not caplog.records, "nothing was tried that the session refuses"


@pytest.mark.parametrize("at", range(1, 12))
def test_a_fault_fails_whom_it_concerns(at: int) -> None:
    """Both steps under way are forgotten; what is not at fault computes them again."""
    loop, session = make()
    requests = [request_of([1, n], 14) for n in range(3)]
    bad = continued([1, 1], 14)[at - 1]

    def fail(batch: StepBatch) -> None:
        fed = batch.ids[batch.slots == requests[1].slot] if len(batch.ids) == len(batch.slots) else batch.ids
        if bad in fed.tolist() and int(batch.past_lengths.max()) > 1:
            raise ValueError("the kernel fell over")

    session.before_step = fail
    loop.add(requests)
    loop.drain()
    assert isinstance(requests[1].error, RequestError)
    assert requests[1].num_generated <= at
    for request in requests:
        check(request)
    assert {requests[0].num_generated, requests[2].num_generated} == {14}
    assert loop.stats()["blocks_used"] == 0


def test_an_interrupted_step_is_run_again() -> None:
    loop, session = make()
    requests = [request_of([1, n], 14) for n in range(3)]
    calls = 0

    def interrupt(batch: StepBatch) -> None:
        nonlocal calls
        calls += 1
        if calls in (1, 5, 9):
            raise KeyboardInterrupt

    session.before_step = interrupt
    loop.add(requests)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            loop.drain()
    loop.drain()
    for request in requests:
        check(request)
        assert request.num_generated == 14


@pytest.mark.daily(1)
@pytest.mark.parametrize("seed", range(8))
def test_random_requests_leave_fail_and_are_preempted(seed: int) -> None:
    rng = random.Random(seed)
    loop, session = make(rng.choice([52, 60, 90]))
    run_random_requests(rng, loop, session)
    assert session.followed > 20


def test_a_close_forgets_what_was_submitted() -> None:
    loop, session = make()
    requests = [request_of([1, n], 30) for n in range(3)]
    loop.add(requests)
    for _ in range(5):
        loop.step()
    loop.close(RequestError("closed"))
    assert session.closed
    assert not loop.has_work
    assert all(request.finished for request in requests)
