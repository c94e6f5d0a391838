"""The loop: faults stay with their request, abort works at any moment, callers in several threads share steps."""

import threading
import time

import numpy as np
import pytest

from ingot.errors import CapacityError, RequestError
from ingot.plan import Limits
from ingot.runtime.executor import Executor
from ingot.runtime.request import FinishReason, Request
from ingot.step_io import StepBatch, StepResult
from tests.runtime.fake_session import FakeSession, continued
from tests.runtime.tiny_engine import make_executor

LIMITS = Limits(max_batch_size=8, max_input_len=40, max_seq_len=48, max_num_tokens=32, max_logit_rows=8)
POISON = 66


def make() -> tuple[Executor, FakeSession]:
    session = FakeSession(100, 4, LIMITS)
    return make_executor(session, LIMITS, 4)[0], session


def request_of(prompt: list[int], count: int, end_ids: frozenset[int] = frozenset()) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count, end_ids=end_ids)


def fail_on_poison(batch: StepBatch) -> None:
    if POISON in batch.ids:
        raise ValueError("the kernel fell over")


def test_a_failing_request_fails_alone() -> None:
    executor, session = make()
    session.before_step = fail_on_poison
    good = [request_of([1, n], 12) for n in range(5)]
    bad = request_of([1, POISON], 3)
    executor.add([*good[:2], bad, *good[2:]])
    executor.drain()
    assert isinstance(bad.error, RequestError)
    assert "fell over" in str(bad.error)
    assert bad.finish_reason is FinishReason.ABORT
    for request in good:
        if POISON in request.generated()[:-1]:
            assert request.error is not None
        else:
            assert request.generated().tolist() == continued(request.tokens[:2].tolist(), 12)
    assert executor.stats()["blocks_used"] == 0


def test_logits_that_are_not_finite_fail_their_request() -> None:
    executor, session = make()

    class Sick(FakeSession):
        def run(self, batch: StepBatch) -> StepResult:
            result = session.run(batch)
            log_probs = result.log_probs.copy()
            log_probs[:1] = np.nan
            return StepResult(ids=result.ids, log_probs=log_probs, logits=None)

    executor = make_executor(Sick(100, 4, LIMITS), LIMITS, 4)[0]
    sick, well = request_of([1], 1), request_of([2], 1)
    executor.add([sick, well])
    executor.drain()
    assert "not finite" in str(sick.error)
    assert well.finish_reason is FinishReason.LENGTH


def test_a_request_larger_than_the_pool_is_refused() -> None:
    executor, _, _ = make_executor(FakeSession(3, 4, LIMITS), LIMITS, 4)
    with pytest.raises(CapacityError, match="3 blocks of 4 tokens"):
        executor.add([request_of([1], 13)])
    executor.add([request_of([1], 12)])  # 12 cached tokens
    executor.drain()


def test_end_token_and_abort() -> None:
    executor, _ = make()
    tokens = continued([5, 6], 20)
    first = request_of([5, 6], 20, frozenset({tokens[4]}))
    second = request_of([7], 30)
    executor.add([first, second])
    executor.step()
    executor.abort([second])
    assert second.blocks.count == 0
    executor.drain()
    assert first.finish_reason is FinishReason.STOP
    assert first.generated().tolist() == tokens[: tokens.index(tokens[4]) + 1]
    assert second.finish_reason is FinishReason.ABORT
    assert second.num_generated == 1
    executor.abort([first])  # finished: stays as it is
    assert first.finish_reason is FinishReason.STOP


def test_abort_while_a_step_computes() -> None:
    executor, session = make()
    inside, go_on = threading.Event(), threading.Event()

    def hold(batch: StepBatch) -> None:
        inside.set()
        assert go_on.wait(5)

    session.before_step = hold
    victim, other = request_of([1, 2], 9), request_of([3], 4)
    executor.add([victim, other])
    thread = threading.Thread(target=executor.step)
    thread.start()
    assert inside.wait(5)
    executor.abort([victim])
    assert executor.stats()["requests_running"] == 1
    late = request_of([4], 2)
    executor.add([late])
    go_on.set()
    thread.join(5)
    assert victim.num_generated == 0
    session.before_step = lambda batch: None
    executor.drain()
    assert other.generated().tolist() == continued([3], 4)
    assert late.generated().tolist() == continued([4], 2)
    assert executor.stats()["blocks_used"] == 0


def test_a_step_that_fails_when_everybody_has_gone() -> None:
    executor, session = make()
    requests = [request_of([1, 2], 9), request_of([3], 4)]

    def fail(batch: StepBatch) -> None:
        executor.abort(requests)
        raise ValueError("the kernel fell over")

    session.before_step = fail
    executor.add(requests)
    executor.drain()
    assert [request.error for request in requests] == [None, None]
    session.before_step = lambda batch: None
    late = request_of([4], 2)
    executor.add([late])
    executor.drain()
    assert late.generated().tolist() == continued([4], 2)
    assert executor.stats()["blocks_used"] == 0


def test_threads_share_steps() -> None:
    executor, session = make()
    session.before_step = lambda batch: time.sleep(0.002)
    results: dict[int, list[int]] = {}

    def work(n: int) -> None:
        request = request_of([n, n + 1], 15)
        executor.add([request])
        executor.wait(lambda: request.finished, lambda: None)
        results[n] = request.generated().tolist()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {n: continued([n, n + 1], 15) for n in range(8)}
    assert len(executor.step_log()) < 8 * 15 / 2
    assert not executor.step()


def test_an_interrupted_step_is_run_again() -> None:
    executor, session = make()

    def interrupt(batch: StepBatch) -> None:
        raise KeyboardInterrupt

    request = request_of([1, 2], 5)
    executor.add([request])
    session.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        executor.step()
    session.before_step = lambda batch: None
    executor.drain()
    assert request.generated().tolist() == continued([1, 2], 5)


def test_close_aborts_and_refuses() -> None:
    executor, session = make()
    request = request_of([1], 9)
    executor.add([request])
    executor.step()
    executor.close()
    executor.close()
    assert session.closed
    assert request.finish_reason is FinishReason.ABORT
    with pytest.raises(RequestError, match="closed"):
        executor.add([request_of([1], 1)])


def test_a_request_that_nobody_queued_cannot_be_aborted() -> None:
    executor, _ = make()
    request = request_of([1, 2], 3)
    executor.abort([request])
    assert not request.finished
    executor.add([request])
    executor.drain()
    assert request.finish_reason is FinishReason.LENGTH


def test_a_request_may_need_every_block() -> None:
    executor = make_executor(FakeSession(12, 4, LIMITS), LIMITS, 4)[0]
    request = request_of([1] * 40, 9)  # 48 tokens in the KV cache
    executor.add([request])
    executor.drain()
    assert request.generated().tolist() == continued([1] * 40, 9)
    with pytest.raises(CapacityError, match="too small for this request"):
        executor.add([request_of([1] * 40, 10)])
