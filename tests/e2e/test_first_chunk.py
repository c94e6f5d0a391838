"""Text is on its way before the next step has ended, however slow the steps are."""

import asyncio
import dataclasses
import threading
from pathlib import Path

from ingot.configs.runtime import RuntimeConfig
from ingot.configs.sampling import SamplingParams
from ingot.runtime.generate_text import stream_text
from ingot.runtime.llm import EngineLLM
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import load_engine
from ingot.runtime.text_stream import TextRequest
from ingot.runtime.tokenizer import Tokenizer
from ingot.step_io import Ahead, Session, StepBatch, StepResult
from tests.runtime.wrapped_session import WrappedSession

PATIENCE = 20.0  # seconds until a step gives up waiting for the reader
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class SlowSession(WrappedSession):
    """From the second step on, a step ends only when a reader has seen the text of the first one."""

    def __init__(self, session: Session, seen: threading.Event) -> None:
        super().__init__(session)
        self._seen, self._steps = seen, 0
        self.in_time = True

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        self._steps += 1
        result = super().run(batch, ahead)
        if self._steps > 1:
            self.in_time &= self._seen.wait(PATIENCE)
        return result


def slow_runner(engine: Path, seen: threading.Event) -> tuple[ModelRunner, SlowSession]:
    config = RuntimeConfig()
    loaded = load_engine(engine, config)
    session = SlowSession(loaded.session, seen)
    return ModelRunner(dataclasses.replace(loaded, session=session), config), session


def test_the_first_piece_of_a_stream(shipped_engine: Path) -> None:
    seen = threading.Event()
    runner, session = slow_runner(shipped_engine, seen)
    with runner:
        for event in stream_text(
            runner, Tokenizer.from_dir(shipped_engine), [TextRequest(prompt="It was", params=GREEDY)]
        ):
            if event.text:
                seen.set()
    assert seen.is_set()
    assert session.in_time


def test_the_first_output_of_an_asynchronous_request(shipped_engine: Path) -> None:
    seen = threading.Event()
    runner, session = slow_runner(shipped_engine, seen)

    async def read(llm: EngineLLM) -> None:
        async for output in llm.generate_async("It was", GREEDY):
            if output.outputs[0].token_ids:
                seen.set()

    with EngineLLM(runner, Tokenizer.from_dir(shipped_engine)) as llm:
        asyncio.run(read(llm))
    assert seen.is_set()
    assert session.in_time
