"""What the heartbeat blames: a step that does not end, never the time before there was work."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.runtime.llm import EngineLLM
from ingot.runtime.server import health
from ingot.runtime.server.health import Pool, Pulse
from ingot.runtime.text_loop import TextLoop
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
    """A text loop on a session whose steps wait for `gate`, and its heart, which beats when `look` asks."""

    def __init__(self, llm: EngineLLM, session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.gate, self.inside = Clock(), threading.Event(), threading.Event()
        self._looked, self._beat = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(health, "time", self.clock)
        session.before_step = self._hold
        self.llm, self.texts, self.pool = llm, TextLoop(llm.runner, llm.tokenizer), Pool()
        self.pulse = Pulse(self.texts, self.pool, TIMEOUT, lambda: None)
        self.pulse.close()  # its thread looks when it likes; here the test says when
        self.pulse._end = SimpleNamespace(wait=self._wait, set=self._leave)  # type: ignore[assignment]
        self._over = False
        self.thread = threading.Thread(target=self.pulse._watch)
        self.thread.start()
        self._looked.acquire()

    def look(self, seconds: float) -> str | None:
        """Let so much time go by, and then one look; what it blames."""
        self.clock.now += seconds
        self._beat.release()
        assert self._looked.acquire(timeout=20)
        return self.pulse.stalled()

    def submit(self) -> None:
        """A request, whose first step has begun when this returns."""
        self.inside.clear()
        params = SamplingParams(max_tokens=2, temperature=0)
        (self.stream,) = make_streams(self.llm.runner, self.llm.tokenizer, 0, TextRequest(prompt=[1], params=params))
        self.texts.submit([self.stream], lambda event: None)
        assert self.inside.wait(20)

    def close(self) -> None:
        self._over = True
        self._beat.release()
        self.thread.join(20)
        self.gate.set()
        self.texts.close()
        self.pool.close()

    def _hold(self, batch: StepBatch) -> None:
        self.inside.set()
        assert self.gate.wait(20)

    def _wait(self, period: float) -> bool:
        self._looked.release()
        assert self._beat.acquire(timeout=60)
        return self._over

    def _leave(self) -> None:
        pass


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    model = make_model()
    model = dataclasses.replace(model, plan=dataclasses.replace(model.plan, vocab_size=VOCAB))
    session = FakeSession(100, model.plan.kv.tokens_per_block, model.plan.limits)
    with EngineLLM(make_runner(model, session), byte_tokenizer(tmp_path, VOCAB)) as llm:
        watched = Watched(llm, session, monkeypatch)
        yield watched
        watched.close()


def test_idle_time_is_nobodys_fault(watched: Watched) -> None:
    for _ in range(3):
        assert watched.look(10 * TIMEOUT) is None
    watched.submit()
    assert watched.look(0.8 * TIMEOUT) is None  # the first look at work, whose time begins here at the latest
    assert watched.look(0.8 * TIMEOUT) is None
    assert "no step has ended" in str(watched.look(0.8 * TIMEOUT))
    watched.texts.cancel([watched.stream])
    assert watched.look(0) is None  # nobody waits for that step any more


def test_idle_time_between_two_requests_is_nobodys_fault(watched: Watched) -> None:
    watched.gate.set()
    watched.submit()
    watched.llm.runner.executor.wait(
        lambda: not watched.llm.runner.executor._scheduler.has_work, lambda: None, steps=False
    )
    watched.gate.clear()
    assert watched.look(1.0) is None
    assert watched.look(10 * TIMEOUT) is None
    watched.submit()
    assert watched.look(0.5 * TIMEOUT) is None
    assert "1 sequences run or wait" in str(watched.look(1.1 * TIMEOUT))


def test_a_look_that_does_not_come_is_the_executors_fault(watched: Watched) -> None:
    watched.clock.now += 1.1 * TIMEOUT
    assert "has not answered for 5.5 s" in str(watched.pulse.stalled())
    assert watched.look(0) is None
