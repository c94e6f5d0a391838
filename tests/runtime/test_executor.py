"""One thread runs the steps: what is asked for meanwhile is done when the step ends, and nobody waits for ever."""

import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.runtime.executor import Executor
from ingot.runtime.outlet import Outlet, StreamDelta
from ingot.runtime.request import FinishReason, Request
from ingot.step_io import Ahead, StepBatch, StepResult
from tests.runtime.fake_session import FakeSession, RepeatingSession, SubmittingSession, continued
from tests.runtime.repeating import LIMITS, check, request_of
from tests.runtime.tiny_engine import make_executor

SECONDS = 30  # longer than any of this takes


@pytest.fixture(params=[FakeSession, RepeatingSession, SubmittingSession])
def session(request: pytest.FixtureRequest) -> FakeSession:
    made: FakeSession = request.param(400, 4, LIMITS)
    return made


@pytest.fixture
def executor(session: FakeSession) -> Iterator[Executor]:
    made = make_executor(session, LIMITS, 4)
    yield made
    session.before_step = lambda batch: None
    made.close()


def until_set(gate: threading.Event) -> None:
    assert gate.wait(SECONDS)


class Gate:
    """Holds a session's step number `at` until `open`."""

    def __init__(self, session: FakeSession, at: int = 1) -> None:
        self._left, self._inside, self._go_on = at, threading.Event(), threading.Event()
        session.before_step = self._step

    def wait(self) -> None:
        assert self._inside.wait(SECONDS)

    def open(self) -> None:
        self._go_on.set()

    def _step(self, batch: StepBatch) -> None:
        self._left -= 1
        if self._left == 0:
            self._inside.set()
            assert self._go_on.wait(SECONDS)


def follow(executor: Executor, requests: list[Request], outlet: Outlet, until: Callable[[], bool]) -> None:
    """Read news until it holds; what is told is there, and told once."""
    told = dict.fromkeys(requests, 0)
    while not until():
        for request, count, ended in outlet.get(SECONDS) or pytest.fail("no news"):
            assert count > told[request] or ended
            prompt = request.tokens[: request.num_prompt].tolist()
            assert request.generated()[:count].tolist() == continued(prompt, count)
            assert len(request.log_probs) >= count
            assert not ended or request.finished
            told[request] = count


def test_an_abort_takes_effect_when_the_step_ends(executor: Executor, session: FakeSession) -> None:
    gate, outlet = Gate(session, at=3), Outlet()
    victim, other, late = request_of([1, 2], 90), request_of([3], 90), request_of([4], 2)
    executor.add([victim, other], outlet)
    gate.wait()
    executor.abort([victim])
    executor.add([late], outlet)
    gate.open()
    follow(executor, [victim, other, late], outlet, lambda: other.finished and late.finished)
    assert victim.finish_reason is FinishReason.ABORT
    assert victim.num_generated == 3  # that of the step, too
    for request in (victim, other, late):
        check(request)
    assert [1, 1] in executor.step_log()[3:5]  # one step may have been submitted already
    assert executor.stats()["blocks_used"] == 0


def test_what_is_asked_after_an_abort_knows_of_it(executor: Executor) -> None:
    for n in range(50):
        requests = [request_of([1, n], 150) for _ in range(3)]
        executor.add(requests, Outlet())
        executor.abort(requests)
        assert executor.stats()["requests_running"] == executor.stats()["blocks_used"] == 0
        assert {request.finish_reason for request in requests} == {FinishReason.ABORT}


def test_a_beat_waits_for_nothing(executor: Executor, session: FakeSession) -> None:
    gate = Gate(session)
    assert not executor.beat.busy
    executor.add([request_of([1, 2], 3)], Outlet())
    gate.wait()
    beat = executor.beat
    assert beat.busy
    assert beat.stats["requests_waiting"] == 1
    gate.open()
    executor.stats()
    assert executor.beat.at > beat.at


def test_whoever_comes_or_goes_ends_the_repetition() -> None:
    session = RepeatingSession(400, 4, LIMITS)
    executor, outlet = make_executor(session, LIMITS, 4), Outlet()
    first, leaver, newcomer = request_of([1, 2], 150), request_of([1, 3], 150), request_of([1, 4], 30)
    steps = 0

    def act(batch: StepBatch) -> None:
        nonlocal steps
        steps += 1
        if steps == 20:
            executor.add([newcomer], outlet)
        if steps == 40:
            executor.abort([leaver])

    session.before_step = act
    executor.add([first, leaver], outlet)
    follow(executor, [first, leaver, newcomer], outlet, lambda: first.finished and newcomer.finished)
    assert executor.step_log()[20] == [2, 2]  # the step after the one in which it came
    assert leaver.num_generated == 40  # nothing that was drawn is lost
    assert executor.step_log()[39][1] == 3
    assert executor.step_log()[40][1] == 2
    assert max(session.repeated) > 4
    for request in (first, leaver, newcomer):
        check(request)
    executor.close()


def test_an_abort_from_inside_a_crossing_keeps_its_tokens() -> None:
    class Aborting(RepeatingSession):
        def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
            result = super().run(batch, ahead)
            if ahead is not None:
                executor.abort([request])
            return result

    session = Aborting(400, 4, LIMITS)
    executor, request = make_executor(session, LIMITS, 4), request_of([1, 2], 190)
    executor.complete([request])
    assert request.finish_reason is FinishReason.ABORT
    assert request.num_generated == 1 + 1 + session.repeated[0]
    check(request)
    executor.close()


def test_a_step_that_fails_when_everybody_wants_to_leave(executor: Executor, session: FakeSession) -> None:
    requests = [request_of([1, 2], 60), request_of([3], 40)]

    def fail(batch: StepBatch) -> None:
        executor.abort(requests)
        raise ValueError("the kernel fell over")

    session.before_step = fail
    executor.complete(requests)
    assert {str(request.error).partition(";")[0] for request in requests} == {str(requests[0].error).partition(";")[0]}
    assert "fell over" in str(requests[0].error)
    session.before_step = lambda batch: None
    late = request_of([4], 2)
    executor.complete([late])
    check(late)
    assert executor.stats()["blocks_used"] == 0


def test_callers_share_steps(executor: Executor, session: FakeSession) -> None:
    requests = [request_of([n, n + 1], 15) for n in range(8)]
    gate = Gate(session)
    threads = [threading.Thread(target=executor.complete, args=([request],)) for request in requests]
    threads[0].start()
    gate.wait()
    for thread in threads[1:]:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    for request in requests:
        check(request)
        assert request.num_generated == 15
    assert len(executor.step_log()) < 8 * 15


def test_ends_alone_are_told_where_nothing_else_is_wanted(executor: Executor) -> None:
    requests, outlet = [request_of([1, n], 3 + 4 * n) for n in range(4)], Outlet(every_step=False)
    executor.add(requests, outlet)
    news: StreamDelta = []
    while len(news) < 4:
        news += outlet.get(SECONDS) or pytest.fail("no news")
    assert [(progress.request, progress.num_generated, progress.ended) for progress in news] == [
        (request, 3 + 4 * n, True) for n, request in enumerate(requests)
    ]


def test_a_reader_that_comes_late_takes_everything_at_once() -> None:
    outlet, requests = Outlet(), [request_of([n], 9) for n in range(2)]
    outlet.wake()
    executor = make_executor(FakeSession(400, 4, LIMITS), LIMITS, 4)
    executor.add(requests, outlet)
    executor.close()
    assert outlet.get_all() == [(request, request.num_generated, True) for request in requests]
    assert outlet.get(timeout=0.001) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dying_thread_is_no_endless_wait(executor: Executor, session: FakeSession) -> None:
    def die(batch: StepBatch) -> None:
        if len(batch.ids) == 1:
            raise SystemExit("gone")

    session.before_step = die
    request = request_of([1, 2], 10)
    executor.complete([request])
    assert "the engine thread has failed" in str(request.error)
    assert "gone" in str(request.error)
    assert request.num_generated == 1
    assert executor.failure is not None
    assert "the engine thread has died" in executor.failure
    with pytest.raises(RequestError, match="the runner is closed"):
        executor.add([request_of([1, 2], 10)], Outlet())
    assert executor.step_log() == [[2, 0]]
    executor.close()
    assert session.closed


def test_a_closed_executor_takes_nothing(executor: Executor, session: FakeSession) -> None:
    executor.complete([request_of([1, 2], 3)])
    for _ in range(2):
        executor.close()
    assert session.closed
    with pytest.raises(RequestError, match="the runner is closed"):
        executor.add([request_of([1], 1)], Outlet())
    assert executor.stats()["requests_waiting"] == 0


def test_an_executor_that_nobody_asked_for_anything_can_be_closed(executor: Executor, session: FakeSession) -> None:
    assert executor.stats()["blocks_used"] == executor.work().steps == 0
    executor.close()
    assert session.closed
    assert not executor._engine.is_alive()


def test_a_request_that_comes_after_the_command_to_close_fails(executor: Executor) -> None:
    """It may have found the executor open just before: it is in the queue behind that command."""
    outlet, late, gate = Outlet(), request_of([1, 2], 10), threading.Event()
    executor._engine.ask(lambda: until_set(gate))
    executor._engine.ask(None)
    executor.add([late], outlet)
    gate.set()
    assert [(each.request, each.ended) for each in outlet.get(SECONDS)] == [(late, True)]
    assert "was closed" in str(late.error)


def test_a_request_behind_the_last_look_at_the_queue_is_refused(executor: Executor) -> None:
    """The thread ends between the question whether it runs and the command."""
    ask = executor._engine.ask

    def ask_late(command: Callable[[], None] | None) -> None:
        ask(None)
        executor._engine.join()
        ask(command)

    executor._engine.ask = ask_late  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="closed before the request began"):
        executor.add([request_of([1, 2], 10)], Outlet())


def test_what_the_thread_does_at_last_is_done_once(executor: Executor) -> None:
    """The thread ends between the command and the question whether it runs."""
    ask, done = executor._engine.ask, list[int]()

    def ask_early(command: Callable[[], None] | None) -> None:
        gate = threading.Event()
        for each in (lambda: until_set(gate), None, command):
            ask(each)
        gate.set()
        executor._engine.join()

    executor._engine.ask = ask_early  # type: ignore[method-assign]
    executor.between_steps(functools.partial(done.append, 1))
    assert done == [1]
    executor._engine.ask = ask  # type: ignore[method-assign]
    executor.between_steps(functools.partial(done.append, 2))
    assert done == [1, 2]


@pytest.mark.daily(1)
def test_a_dropped_executor_ends_its_thread_and_session(session: FakeSession) -> None:
    executor = make_executor(session, LIMITS, 4)
    executor.complete([request_of([1, 2], 3)])
    thread, gone = executor._engine, weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    thread.join(SECONDS)
    assert session.closed


def test_the_system_may_have_no_thread_to_give(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RequestError, match="starts no thread"):
            make_executor(session, LIMITS, 4)
    assert session.closed


def _follow(executor: Executor, requests: list[Request], leave_at: int) -> None:
    outlet = Outlet()
    executor.add(requests, outlet)
    follow(
        executor,
        requests,
        outlet,
        lambda: sum(r.num_generated for r in requests) >= leave_at or all(r.finished for r in requests),
    )
    executor.abort(requests)


def _complete(executor: Executor, requests: list[Request], leave_at: int) -> None:
    executor.complete(requests)
    assert [request.num_generated for request in requests] == [request.max_new_tokens for request in requests]


def _leave(executor: Executor, requests: list[Request], leave_at: int) -> None:
    executor.add(requests, Outlet())
    executor.abort(requests)


@pytest.mark.slow
def test_many_who_follow_add_and_leave_share_steps(executor: Executor, session: FakeSession) -> None:
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(12):
                requests = [request_of([1, rng.randint(0, 90)], rng.randint(1, 90)) for _ in range(rng.randint(1, 3))]
                rng.choice([_follow, _complete, _leave])(executor, requests, rng.choice([1000, 1, rng.randint(1, 60)]))
                executor.stats()
                for request in requests:
                    check(request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive(), "somebody waits for ever"
    assert failures == []
    assert executor.stats()["blocks_used"] == 0
    assert not isinstance(session, RepeatingSession) or max(session.repeated) > 4
    assert not isinstance(session, SubmittingSession) or session.followed > 4


@pytest.mark.parametrize("seed", range(3))
def test_a_close_at_any_moment_leaves_nobody_waiting(seed: int, executor: Executor, session: FakeSession) -> None:
    rng, started = np.random.default_rng(seed), threading.Barrier(5)
    ended: list[Request] = []

    def ask(n: int) -> None:
        started.wait()
        for k in range(10_000):
            request = request_of([n, k % 90], 5)
            try:
                executor.complete([request])
            except RequestError:
                return
            ended.append(request)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    for _ in range(int(rng.integers(0, 20))):
        executor.stats()
    executor.close()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "somebody waits for ever"
    assert all(request.finished for request in ended)
    assert session.closed
