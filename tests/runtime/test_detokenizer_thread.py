"""What a stop text ends is ended before anybody hears of it, and threads that wait do not seem to work."""

import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import CapacityError, RequestError
from ingot.runtime.detokenizer_thread import DetokenizerThread
from ingot.runtime.generate_text import stream_text
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Outlet
from ingot.runtime.reports import Stats
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.text_stream import TextEvent, TextRequest, make_streams
from ingot.runtime.tokenizer import Tokenizer
from ingot.step_io import StepBatch
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.fake_session import VOCAB, FakeSession, continued
from tests.runtime.test_closing import until
from tests.runtime.tiny_engine import make_runner
from tests.runtime.tiny_plan import make_model

PROMPT = [1, 2, 3]
SECONDS = 30  # longer than any of this takes


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path, VOCAB)


def make(blocks: int = 100) -> tuple[ModelRunner, FakeSession]:
    model = make_model()
    model = dataclasses.replace(model, plan=dataclasses.replace(model.plan, vocab_size=VOCAB))
    session = FakeSession(blocks, model.plan.tokens_per_block, model.plan.limits)
    return make_runner(model, session), session


def hold(session: FakeSession) -> Callable[[], None]:
    """Makes the session's sixth step wait for what is returned to be called."""
    go_on, steps = threading.Event(), itertools.count(1)

    def before(batch: StepBatch) -> None:
        if next(steps) == 6:
            assert go_on.wait(SECONDS)

    session.before_step = before
    return go_on.set


def asked(tokenizer: Tokenizer) -> TextRequest:
    """Stops at one of the first three tokens of fifty."""
    stop = tokenizer.decode(continued(PROMPT, 3)[2:])
    return TextRequest(prompt=PROMPT, params=SamplingParams(max_tokens=50, temperature=0, stop=stop))


def test_a_stop_text_has_ended_its_request_when_it_is_told(tokenizer: Tokenizer) -> None:
    """Whatever is asked of the runner from then on comes behind the abort."""
    runner, session = make()
    go_on = hold(session)
    loop = DetokenizerThread(runner, tokenizer)
    (stream,) = make_streams(runner, tokenizer, 0, asked(tokenizer))
    told: queue.SimpleQueue[Stats] = queue.SimpleQueue()

    def sink(event: TextEvent) -> None:
        if event.finish_reason is not None:
            go_on()
            told.put(runner.stats())

    loop.submit([stream], sink)
    stats = told.get(timeout=SECONDS)
    assert (stats["requests_running"], stats["blocks_used"]) == (0, 0)
    assert stream.request.finish_reason is FinishReason.ABORT
    loop.close()


def test_a_stop_text_ends_what_a_stream_runs(tokenizer: Tokenizer) -> None:
    runner, session = make()
    go_on = hold(session)
    events = stream_text(runner, tokenizer, [asked(tokenizer)])
    next(event for event in events if event.finish_reason is not None)
    go_on()
    stats = runner.stats()
    assert (stats["requests_running"], stats["blocks_used"]) == (0, 0)
    assert len(runner.step_log()) <= 6
    assert list(events) == []


def test_threads_that_wait_are_at_no_text(tokenizer: Tokenizer) -> None:
    runner, _ = make()
    loop, told = DetokenizerThread(runner, tokenizer), threading.Event()
    busy_since: list[float | None] = []

    def sink(event: TextEvent) -> None:
        busy_since.append(loop.busy_since)
        if event.finish_reason is not None:
            told.set()

    loop.submit(make_streams(runner, tokenizer, 0, asked(tokenizer)), sink)
    assert told.wait(SECONDS)
    loop.close()
    assert None not in busy_since
    assert loop.busy_since is None


def test_a_loop_that_refused_a_request_can_be_closed(tokenizer: Tokenizer) -> None:
    runner, _ = make(blocks=1)
    loop = DetokenizerThread(runner, tokenizer)
    streams = make_streams(runner, tokenizer, 0, asked(tokenizer))
    with pytest.raises(CapacityError):
        loop.submit(streams, lambda event: None)
    closing = threading.Thread(target=loop.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_a_request_that_comes_while_the_loop_closes_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have found the loop open just before; neither it nor the closing waits for ever."""
    runner, _ = make()
    loop = DetokenizerThread(runner, tokenizer)
    streams = make_streams(runner, tokenizer, 0, asked(tokenizer))
    add, closing = runner.executor.add, threading.Thread(target=loop.close, daemon=True)

    def add_late(requests: Iterable[Request], outlet: Outlet) -> None:
        closing.start()
        until(lambda: loop._closed)
        add(requests, outlet)

    monkeypatch.setattr(runner.executor, "add", add_late)
    with pytest.raises(RequestError, match="the LLM is closed"):
        loop.submit(streams, lambda event: None)
    closing.join(SECONDS)
    assert not closing.is_alive()
    until(lambda: all(stream.request.finished for stream in streams))  # after the step that runs


def test_a_closed_runner_keeps_no_loop_open(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is refused, and the thread that waited for it ends."""
    runner, _ = make()
    loop = DetokenizerThread(runner, tokenizer)
    closing = threading.Thread(target=loop.close, daemon=True)

    def refuse(requests: Iterable[Request], outlet: Outlet) -> None:
        closing.start()
        until(lambda: loop._closed)
        raise RequestError("the runner is closed")

    monkeypatch.setattr(runner.executor, "add", refuse)
    with pytest.raises(RequestError, match="the runner is closed"):
        loop.submit(make_streams(runner, tokenizer, 0, asked(tokenizer)), lambda event: None)
    closing.join(SECONDS)
    assert not closing.is_alive()
