"""Requests that somebody else ends fail in words, and all that was computed before is told first."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.detokenizer_thread import DetokenizerThread
from ingot.runtime.executor import Executor
from ingot.runtime.generate_text import complete_text
from ingot.runtime.llm import AsyncOutputs, EngineLLM
from ingot.runtime.llm_outputs import RequestOutput
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.text_stream import TextEvent, TextRequest, make_streams
from ingot.step_io import StepBatch
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.fake_session import VOCAB, FakeSession, continued
from tests.runtime.repeating import LIMITS, request_of
from tests.runtime.tiny_engine import make_executor, make_runner
from tests.runtime.tiny_plan import make_model

CLOSED = "closed before the request ended"
LONG = SamplingParams(max_tokens=50, temperature=0, seed=1)


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.001)


class CloseIn:
    """Before step number `at`: another thread closes, and the step goes on once it waits."""

    def __init__(self, session: FakeSession, executor: Executor, close: Callable[[], None], at: int = 4) -> None:
        self._executor, self._left = executor, at
        self.thread = threading.Thread(target=close)
        session.before_step = self._step

    def _step(self, batch: StepBatch) -> None:
        self._left -= 1
        if self._left == 0:
            self.thread.start()
            until(lambda: self._executor._closed)

    def join(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def session() -> FakeSession:
    plan = make_model().plan
    return FakeSession(100, plan.tokens_per_block, plan.limits)


@pytest.fixture
def runner(session: FakeSession) -> Iterator[ModelRunner]:
    model = make_model()
    model = dataclasses.replace(model, plan=dataclasses.replace(model.plan, vocab_size=VOCAB))
    with make_runner(model, session) as runner:
        yield runner


@pytest.fixture
def llm(runner: ModelRunner, tmp_path: Path) -> Iterator[EngineLLM]:
    with EngineLLM(runner, byte_tokenizer(tmp_path, VOCAB)) as llm:
        yield llm


def test_close_fails_a_running_generate(session: FakeSession, runner: ModelRunner) -> None:
    closing = CloseIn(session, runner.executor, runner.close)
    with pytest.raises(RequestError, match=CLOSED):
        runner.generate([[1, 2]], max_new_tokens=50)
    closing.join()
    assert session.closed


def test_a_stream_gives_every_token_before_the_failure(session: FakeSession, runner: ModelRunner) -> None:
    closing = CloseIn(session, runner.executor, runner.close)
    came: list[dict[str, Any]] = []
    with pytest.raises(RequestError, match=CLOSED):
        came.extend(runner.generate([[1, 2]], max_new_tokens=50, streaming=True, return_dict=True))
    closing.join()
    assert came[-1]["output_ids"][0, 0, 2:].tolist() == continued([1, 2], 4)  # that of the held step, too
    assert len(came) == 4
    assert came[0]["finish_reasons"] == [[None]]


def test_an_abort_by_somebody_else_is_no_short_result(session: FakeSession, runner: ModelRunner) -> None:
    def abort(batch: StepBatch) -> None:
        if len(runner.step_log()) == 3:
            runner.executor.abort(list(runner.executor._loop._scheduler.running))

    session.before_step = abort
    with pytest.raises(RequestError, match="somebody else"):
        runner.generate([[1, 2]], max_new_tokens=50)


def test_close_of_an_llm_fails_its_calls(session: FakeSession, llm: EngineLLM) -> None:
    closing = CloseIn(session, llm.runner.executor, llm.close)
    with pytest.raises(RequestError, match=CLOSED):
        llm.generate(["1", "2"], LONG)
    closing.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ingot")]


def test_asynchronous_results_give_every_token_before_the_failure(session: FakeSession, llm: EngineLLM) -> None:
    closing = CloseIn(session, llm.runner.executor, llm.close)
    came: list[RequestOutput] = []

    async def follow(outputs: AsyncOutputs) -> None:
        async for each in outputs:
            came.append(each)

    async def read() -> None:
        outputs = llm.generate_async([1, 2], LONG)
        with pytest.raises(RequestError, match=CLOSED):
            await follow(outputs)
        assert [each async for each in outputs] == []

    asyncio.run(read())
    closing.join()
    assert came[-1].outputs[0].token_ids == continued([1, 2], 4)


def test_close_fails_texts_in_words(session: FakeSession, llm: EngineLLM) -> None:
    closing = CloseIn(session, llm.runner.executor, llm.runner.close)
    (told,) = complete_text(llm.runner, llm.tokenizer, [TextRequest(prompt=[1, 2], params=LONG)])
    closing.join()
    assert told.finish_reason == "abort"
    assert CLOSED in str(told.error)
    assert list(told.token_ids) == continued([1, 2], 4)


def test_a_text_loop_fails_what_runs_when_it_is_closed(session: FakeSession, llm: EngineLLM) -> None:
    texts = DetokenizerThread(llm.runner, llm.tokenizer)
    events: list[TextEvent] = []
    (stream,) = make_streams(llm.runner, llm.tokenizer, 0, TextRequest(prompt=[1, 2], params=LONG))
    closer = threading.Thread(target=texts.close)

    def close(batch: StepBatch) -> None:
        if len(llm.runner.step_log()) == 3:
            closer.start()
            until(lambda: not llm.runner.executor._engine._commands.empty())

    session.before_step = close
    texts.submit([stream], events.append)
    texts._thread.join(20)
    closer.join(20)
    assert "the LLM was closed before the request ended" in str(events[-1].error)
    with pytest.raises(RequestError, match="the LLM is closed"):
        texts.submit([stream], events.append)


def test_everybody_who_closes_waits_for_the_step() -> None:
    """After close the caller may free the weights."""
    session = FakeSession(100, 4, LIMITS)
    executor = make_executor(session, LIMITS, 4)
    closed: list[bool] = []

    def close() -> None:
        executor.close()
        closed.append(session.closed)

    second = threading.Thread(target=close)
    first = CloseIn(session, executor, close, at=1)
    step = session.before_step

    def begin_both(batch: StepBatch) -> None:
        step(batch)
        second.start()
        second.join(0.05)
        assert closed == []

    session.before_step = begin_both
    executor.complete([request_of([1], 3)])
    first.join()
    second.join(20)
    assert closed == [True, True]
