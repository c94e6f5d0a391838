"""What a stop text ends is ended before anybody hears of it, and threads that wait do not seem to work."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import CapacityError
from ingot.runtime.generate_text import stream_text
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.text_loop import TextLoop
from ingot.runtime.text_stream import TextEvent, TextRequest, make_streams
from ingot.runtime.tokenizer import Tokenizer
from ingot.step_io import StepBatch
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.fake_session import VOCAB, FakeSession, continued
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
    session = FakeSession(blocks, model.plan.kv.tokens_per_block, model.plan.limits)
    return make_runner(model, session), session


@pytest.fixture
def held() -> Iterator[Callable[[FakeSession], None]]:
    """Makes a session's sixth step wait for the end of the test."""
    over = threading.Event()

    def hold(session: FakeSession) -> None:
        steps: list[StepBatch] = []

        def before(batch: StepBatch) -> None:
            steps.append(batch)
            if len(steps) == 6:
                over.wait(SECONDS)

        session.before_step = before

    yield hold
    over.set()


def asked(tokenizer: Tokenizer) -> TextRequest:
    """Stops at one of the first three tokens of fifty."""
    stop = tokenizer.decode(continued(PROMPT, 3)[2:])
    return TextRequest(prompt=PROMPT, params=SamplingParams(max_tokens=50, temperature=0, stop=stop))


def test_a_stop_text_has_ended_its_request_when_it_is_told(
    tokenizer: Tokenizer, held: Callable[[FakeSession], None]
) -> None:
    runner, session = make()
    held(session)
    loop = TextLoop(runner, tokenizer)
    (stream,) = make_streams(runner, tokenizer, 0, asked(tokenizer))
    told, finished = threading.Event(), []

    def sink(event: TextEvent) -> None:
        if event.finish_reason is not None:
            finished.append(stream.request.finished)
            told.set()

    loop.submit([stream], sink)
    assert told.wait(SECONDS)
    assert finished == [True]
    assert runner.stats()["blocks_used"] == 0
    threading.Thread(target=loop.close, daemon=True).start()


def test_a_stop_text_ends_what_a_stream_runs(tokenizer: Tokenizer, held: Callable[[FakeSession], None]) -> None:
    runner, session = make()
    held(session)
    events = stream_text(runner, tokenizer, [asked(tokenizer)])
    next(event for event in events if event.finish_reason is not None)
    stats = runner.stats()
    assert (stats["requests_running"], stats["blocks_used"]) == (0, 0)


def test_threads_that_wait_are_at_no_text(tokenizer: Tokenizer) -> None:
    runner, _ = make()
    loop, told = TextLoop(runner, tokenizer), threading.Event()
    turning: list[float | None] = []

    def sink(event: TextEvent) -> None:
        turning.append(loop.turning)
        if event.finish_reason is not None:
            told.set()

    loop.submit(make_streams(runner, tokenizer, 0, asked(tokenizer)), sink)
    assert told.wait(SECONDS)
    loop.close()
    assert None not in turning
    assert loop.turning is None


def test_a_loop_that_refused_a_request_can_be_closed(tokenizer: Tokenizer) -> None:
    runner, _ = make(blocks=1)
    loop = TextLoop(runner, tokenizer)
    streams = make_streams(runner, tokenizer, 0, asked(tokenizer))
    with pytest.raises(CapacityError):
        loop.submit(streams, lambda event: None)
    closing = threading.Thread(target=loop.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()
