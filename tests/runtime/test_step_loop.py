"""The loop, a step at a time: faults stay with their request, an abort frees what it held."""

import dataclasses

import numpy as np
import pytest

from ingot.errors import CapacityError, RequestError
from ingot.plan import Limits
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, StepBatch, StepResult
from tests.runtime.fake_session import FakeSession, continued
from tests.runtime.tiny_engine import make_loop

LIMITS = Limits(max_batch_size=8, max_input_len=40, max_seq_len=48, max_num_tokens=32, max_logit_rows=8)
POISON = 66


def make() -> tuple[StepLoop, FakeSession]:
    session = FakeSession(100, 4, LIMITS)
    return make_loop(session, LIMITS, 4)[0], session


def request_of(prompt: list[int], count: int, end_ids: frozenset[int] = frozenset()) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count, end_ids=end_ids)


def fail_on_poison(batch: StepBatch) -> None:
    if POISON in batch.ids:
        raise ValueError("the kernel fell over")


def test_a_failing_request_fails_alone() -> None:
    loop, session = make()
    session.before_step = fail_on_poison
    good = [request_of([1, n], 12) for n in range(5)]
    bad = request_of([1, POISON], 3)
    loop.add([*good[:2], bad, *good[2:]])
    loop.drain()
    assert isinstance(bad.error, RequestError)
    assert "fell over" in str(bad.error)
    assert bad.finish_reason is FinishReason.ABORT
    for request in good:
        if POISON in request.generated()[:-1]:
            assert request.error is not None
        else:
            assert request.generated().tolist() == continued(request.tokens[:2].tolist(), 12)
    assert loop.stats()["blocks_used"] == 0


def test_logits_that_are_not_finite_fail_their_request() -> None:
    class Sick(FakeSession):
        def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
            result = super().run(batch, ahead)
            log_probs = result.log_probs.copy()
            log_probs[:, :1] = np.nan
            return dataclasses.replace(result, log_probs=log_probs)

    loop = make_loop(Sick(100, 4, LIMITS), LIMITS, 4)[0]
    sick, well = request_of([1], 1), request_of([2], 1)
    loop.add([sick, well])
    loop.drain()
    assert "not finite" in str(sick.error)
    assert well.finish_reason is FinishReason.LENGTH


def test_a_request_larger_than_the_pool_is_refused() -> None:
    loop, _, _ = make_loop(FakeSession(3, 4, LIMITS), LIMITS, 4)
    with pytest.raises(CapacityError, match="3 blocks of 4 tokens"):
        loop.require_fits([request_of([1], 13)])
    fits = request_of([1], 12)  # 12 cached tokens
    loop.require_fits([fits])
    loop.add([fits])
    loop.drain()


def test_end_token_and_abort() -> None:
    loop, _ = make()
    tokens = continued([5, 6], 20)
    first = request_of([5, 6], 20, frozenset({tokens[4]}))
    second = request_of([7], 30)
    loop.add([first, second])
    loop.step()
    loop.abort([second])
    assert second.blocks.count == 0
    loop.drain()
    assert first.finish_reason is FinishReason.STOP
    assert first.generated().tolist() == tokens[: tokens.index(tokens[4]) + 1]
    assert second.finish_reason is FinishReason.ABORT
    assert second.num_generated == 1
    loop.abort([first])  # finished: stays as it is
    assert first.finish_reason is FinishReason.STOP


def test_an_interrupted_step_is_run_again() -> None:
    loop, session = make()

    def interrupt(batch: StepBatch) -> None:
        raise KeyboardInterrupt

    request = request_of([1, 2], 5)
    loop.add([request])
    session.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    session.before_step = lambda batch: None
    loop.drain()
    assert request.generated().tolist() == continued([1, 2], 5)


def test_close_fails_what_is_left() -> None:
    loop, session = make()
    request = request_of([1], 9)
    loop.add([request])
    loop.step()
    for _ in range(2):
        loop.close(RequestError("that is all"))
    assert session.closed
    assert request.finish_reason is FinishReason.ABORT
    assert "that is all" in str(request.error)
    assert not loop.step()


def test_a_request_that_nobody_queued_cannot_be_aborted() -> None:
    loop, _ = make()
    request = request_of([1, 2], 3)
    loop.abort([request])
    assert not request.finished
    loop.add([request])
    loop.drain()
    assert request.finish_reason is FinishReason.LENGTH


def test_a_request_may_need_every_block() -> None:
    loop = make_loop(FakeSession(12, 4, LIMITS), LIMITS, 4)[0]
    request = request_of([1] * 40, 9)  # 48 tokens in the KV cache
    loop.require_fits([request])
    loop.add([request])
    loop.drain()
    assert request.generated().tolist() == continued([1] * 40, 9)
    with pytest.raises(CapacityError, match="too small for this request"):
        loop.require_fits([request_of([1] * 40, 10)])
