"""Each step is told once, whoever else adds, waits and leaves meanwhile."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from ingot.runtime.executor import Executor
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.step_by_step import StepsAhead, step_by_step
from ingot.step_io import StepBatch
from tests.runtime.fake_session import FakeSession, continued
from tests.runtime.repeating import LIMITS, check, make, request_of
from tests.runtime.tiny_engine import make_executor


@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_told_once_though_several_come_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    executor, session = make()
    session.before_step = lambda batch: time.sleep(rng.choice([0, 0, 0.002]))
    requests = [request_of([1, n, *range(rng.randint(0, 30))], rng.randint(1, 60)) for n in range(12)]
    before = [0] * len(requests)
    told = 0
    for shown in step_by_step(executor, requests):
        told += 1
        grown = [after - then for then, after in zip(before, shown, strict=True)]
        assert set(grown) == {0, 1}
        assert all(request.num_generated >= n for request, n in zip(requests, shown, strict=True))
        before = list(shown)
    assert told <= len(executor.step_log())
    assert told == len({step for request in requests for step in request.steps or ()})
    assert before == [request.max_new_tokens for request in requests]
    assert max(session.repeated) > 1
    for request in requests:
        check(request)


def test_dropping_what_comes_step_by_step_aborts_it() -> None:
    executor, session = make()
    requests = [request_of([1, n], 150) for n in range(4)]
    session.before_step = lambda batch: time.sleep(0.001)
    for shown in step_by_step(executor, requests):
        if shown[0] == 40:
            break
    executor.wait(lambda: all(request.finished for request in requests), lambda: None)
    assert {request.finish_reason for request in requests} == {FinishReason.ABORT}
    assert requests[0].num_generated < 150
    assert executor.stats()["blocks_used"] == 0


def test_steps_wait_for_who_looks_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _, _ = make_executor(FakeSession(400, 4, LIMITS), LIMITS, 4)
    looked, over = threading.Event(), threading.Event()

    def run_until(stop: Callable[[], bool], most: Callable[[], int]) -> None:
        executor.step()
        looked.wait(30)
        while most() and executor.step():
            pass
        over.set()

    monkeypatch.setattr(executor, "run_until", run_until)
    request = request_of([1, 2], 150)
    lengths = step_by_step(executor, [request])
    assert next(lengths) == [1]
    looked.set()
    assert over.wait(30)
    assert request.num_generated == 3


def test_a_dying_step_thread_is_no_endless_wait() -> None:
    executor, session = make()

    def die(batch: StepBatch) -> None:
        raise SystemExit("gone")

    session.before_step = die
    with pytest.raises(SystemExit):
        list(step_by_step(executor, [request_of([1, 2], 10)]))


def test_the_callers_own_failure_is_raised_though_the_steps_fail_too() -> None:
    executor, session = make()

    def die(batch: StepBatch) -> None:
        raise SystemExit("gone")

    session.before_step = die
    executor.add([request_of([1, 2], 10)])

    def fail_too() -> None:
        with StepsAhead(executor) as ahead:
            executor.wait(ahead.failed, lambda: None, steps=False)
            raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="own"):
        fail_too()


def _follow(executor: Executor, requests: list[Request], leave_at: int) -> None:
    shown = [0] * len(requests)
    for shown in step_by_step(executor, requests):
        for request, n in zip(requests, shown, strict=True):
            assert request.generated()[:n].tolist() == continued(request.tokens[: request.num_prompt].tolist(), n)
        if sum(shown) >= leave_at:
            return
    assert shown == [request.max_new_tokens for request in requests]


def _wait(executor: Executor, requests: list[Request], leave_at: int) -> None:
    executor.add(requests)
    executor.wait(lambda: all(request.finished for request in requests), lambda: None)
    assert [request.num_generated for request in requests] == [request.max_new_tokens for request in requests]


def _watch(executor: Executor, requests: list[Request], leave_at: int) -> None:
    executor.add(requests)
    wanted = min(leave_at, sum(request.max_new_tokens for request in requests))
    with StepsAhead(executor):
        executor.wait(lambda: sum(r.num_generated for r in requests) >= wanted, lambda: None, steps=False)
    executor.abort(requests)


def test_many_who_follow_add_and_leave_share_steps_that_follow_each_other() -> None:
    executor, session = make()
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(12):
                requests = [request_of([1, rng.randint(0, 90)], rng.randint(1, 90)) for _ in range(rng.randint(1, 3))]
                rng.choice([_follow, _wait, _watch])(executor, requests, rng.choice([1000, 1, rng.randint(1, 60)]))
                for request in requests:
                    check(request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody waits for ever"
    assert failures == []
    executor.drain()
    assert executor.stats()["blocks_used"] == 0
    assert max(session.repeated) > 4
