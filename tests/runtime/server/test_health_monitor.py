"""What the heartbeat blames: a step that does not end, never the time before there was work."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.runtime import executor
from ingot.runtime.detokenizer_thread import DetokenizerThread
from ingot.runtime.llm import EngineLLM
from ingot.runtime.server import health
from ingot.runtime.server.health import HealthMonitor, PrepareExecutor
from ingot.runtime.text_stream import TextRequest, make_streams
from ingot.step_io import StepBatch
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.fake_session import VOCAB, FakeSession
from tests.runtime.tiny_engine import make_runner
from tests.runtime.tiny_plan import make_model

TIMEOUT = 5.0


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Watched:
    """A text loop on a session whose steps wait until they may end, and its heart."""

    def __init__(self, llm: EngineLLM, session: FakeSession, clock: Clock) -> None:
        self.clock, self._begun, self._permits = clock, threading.Semaphore(0), threading.Semaphore(0)
        session.before_step = self._hold
        self.llm, self.texts, self.pool = llm, DetokenizerThread(llm.runner, llm.tokenizer), PrepareExecutor()
        self.health = HealthMonitor(self.texts, self.pool, TIMEOUT)

    def look(self, seconds: float) -> str | None:
        """What it blames when so much more time has gone by."""
        self.clock.now += seconds
        return self.health.stalled()

    def submit(self, tokens: int = 2) -> None:
        """A request, whose first step has begun when this returns."""
        params = SamplingParams(max_tokens=tokens, temperature=0)
        (self.stream,) = make_streams(self.llm.runner, self.llm.tokenizer, 0, TextRequest(prompt=[1], params=params))
        self.texts.submit([self.stream], lambda event: None)
        self.wait_for_a_step()

    def wait_for_a_step(self) -> None:
        """Until one more has begun."""
        assert self._begun.acquire(timeout=20)

    def let(self, steps: int) -> None:
        """So many may end."""
        self._permits.release(steps)

    def close(self) -> None:
        self.let(100)
        self.texts.close()
        self.pool.close()

    def _hold(self, batch: StepBatch) -> None:
        self._begun.release()
        assert self._permits.acquire(timeout=20)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    clock = Clock()
    for module in (health, executor):
        monkeypatch.setattr(module, "time", clock)
    model = make_model()
    model = dataclasses.replace(model, plan=dataclasses.replace(model.plan, vocab_size=VOCAB))
    session = FakeSession(100, model.plan.tokens_per_block, model.plan.limits)
    with EngineLLM(make_runner(model, session), byte_tokenizer(tmp_path, VOCAB)) as llm:
        watched = Watched(llm, session, clock)
        yield watched
        watched.close()


def test_idle_time_is_nobodys_fault(watched: Watched) -> None:
    for _ in range(3):
        assert watched.look(10 * TIMEOUT) is None
    watched.submit()
    assert watched.look(0.9 * TIMEOUT) is None
    assert watched.look(0.2 * TIMEOUT) == "no step has ended for 5.5 s while 1 sequences run or wait"
    watched.texts.cancel([watched.stream])
    assert watched.look(0) is not None  # a step that hangs keeps the next request waiting
    watched.let(1)
    assert watched.llm.stats()["requests_running"] == 0
    assert watched.look(10 * TIMEOUT) is None


def test_idle_time_between_two_requests_is_nobodys_fault(watched: Watched) -> None:
    watched.let(1)
    watched.submit(tokens=1)
    assert watched.llm.stats()["requests_running"] == 0
    assert watched.look(1.0) is None
    assert watched.look(10 * TIMEOUT) is None
    watched.submit()
    assert watched.look(0.5 * TIMEOUT) is None
    assert "1 sequences run or wait" in str(watched.look(0.6 * TIMEOUT))


def test_every_step_that_ends_is_a_beat(watched: Watched) -> None:
    watched.submit(tokens=9)
    for _ in range(5):
        assert watched.look(0.9 * TIMEOUT) is None
        watched.let(1)
        watched.wait_for_a_step()
    assert "for 5.5 s" in str(watched.look(1.1 * TIMEOUT))
