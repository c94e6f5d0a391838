"""What holds an engine stays in its process, has one copy, and is not asked for steps from inside a step."""

import asyncio
import copy
import dataclasses
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError, UsageError
from ingot.plugins.registry import find_target
from ingot.runtime.generate_text import complete_text
from ingot.runtime.llm import EngineLLM
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.text_stream import TextRequest
from ingot.step_io import Float32, StepBatch
from tests.house.project import ROOT
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.fake_session import VOCAB, FakeSession
from tests.runtime.tiny_engine import make_runner, open_session
from tests.runtime.tiny_plan import make_model

SHORT = SamplingParams(max_tokens=3, temperature=0, seed=1)


def in_a_child(work: Callable[[], None]) -> int:
    """The exit code of a forked child that does this: 0, or 1 where it raises; -9 where it does not end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(RequestError, match="forked child"):
        work()


async def _read(llm: EngineLLM) -> None:
    async for _ in llm.generate_async("1", SHORT):
        pass


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "use",
    [
        lambda llm: refused(lambda: llm.generate("1", SHORT)),
        lambda llm: refused(lambda: llm.runner.generate([[1]])),
        lambda llm: refused(lambda: list(llm.runner.generate([[1]], streaming=True))),
        lambda llm: refused(lambda: asyncio.run(_read(llm))),
        lambda llm: refused(llm.stats),
        lambda llm: refused(llm.runner.step_log),
        lambda llm: llm.close(),
        lambda llm: llm.runner.close(),
    ],
)
@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_is_refused_and_can_leave(
    llm: EngineLLM, session: FakeSession, use: Callable[[EngineLLM], None], busy: bool
) -> None:
    """busy: a step is under way at the fork, and others wait for it."""
    llm.generate("1", SHORT)
    inside, done = threading.Event(), threading.Event()

    def hold(batch: StepBatch) -> None:
        inside.set()
        assert done.wait(60)

    callers = [threading.Thread(target=llm.generate, args=("1", SHORT)), threading.Thread(target=llm.stats)]
    if busy:
        session.before_step = hold
        callers[0].start()
        assert inside.wait(20)
        callers[1].start()
    try:
        assert in_a_child(lambda: use(llm)) == 0
    finally:
        done.set()
    if busy:
        for caller in callers:
            caller.join()
    assert len(llm.generate("1", SHORT)[0].outputs[0].token_ids) == 3  # the parent's goes on


@pytest.mark.slow
@pytest.mark.native
def test_a_child_can_drop_a_native_engine() -> None:
    target = find_target("cpu")
    model = make_model(target)
    runners = [make_runner(model, open_session(model, target, 100))]
    runners[0].generate([[1, 2]])

    def drop() -> None:
        runners.clear()
        gc.collect()

    assert in_a_child(drop) == 0
    assert runners[0].generate([[1, 2]], max_new_tokens=2).shape == (1, 1, 4)
    runners[0].close()


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_there_is_one_copy(llm: EngineLLM, way: Callable[[object], object]) -> None:
    for each in (llm, llm.runner, llm.runner.executor, llm.generate_async("1")):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            way(each)


def test_a_runner_is_made_of_a_loaded_engine() -> None:
    with pytest.raises(UsageError, match=r"ModelRunner.from_dir"):
        ModelRunner("engine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.runner.generate([[1]]),
        lambda llm: list(llm.runner.generate([[1]], streaming=True)),
        lambda llm: llm.runner.close(),
        lambda llm: llm.generate("1", SHORT),
        lambda llm: asyncio.run(_read(llm)),
        lambda llm: llm.close(),
    ],
)
@pytest.mark.parametrize("asked_through", ["llm", "runner"])
def test_a_processor_that_calls_its_own_runner_fails_alone(
    llm: EngineLLM, call: Callable[[EngineLLM], object], asked_through: str
) -> None:
    def processor(logits: Float32) -> Float32:
        call(llm)
        return logits

    params = dataclasses.replace(SHORT, logits_processors=[processor])
    ways: dict[str, Callable[[], object]] = {
        "llm": lambda: llm.generate("1", params),
        "runner": lambda: llm.runner.generate([[1]], sampling_config=params),
    }
    with pytest.raises(RequestError, match="cannot use the runner that calls it"):
        ways[asked_through]()
    assert len(llm.generate("1", SHORT)[0].outputs[0].token_ids) == 3


def test_a_processor_may_look_and_abort(llm: EngineLLM) -> None:
    def processor(logits: Float32) -> Float32:
        llm.stats()
        llm.runner.step_log()
        llm.generate_async("1")  # dropped, which aborts nothing
        return logits

    (result,) = llm.generate("1", dataclasses.replace(SHORT, logits_processors=[processor]))
    assert len(result.outputs[0].token_ids) == 3


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("asked_through", ["llm", "runner"])
def test_what_a_processor_raises_ends_its_request_alone(
    llm: EngineLLM, error: type[BaseException], asked_through: str
) -> None:
    def processor(logits: Float32) -> Float32:
        raise error("no")

    params = dataclasses.replace(SHORT, logits_processors=[processor])
    ways: dict[str, Callable[[], object]] = {
        "llm": lambda: llm.generate("1", params),
        "runner": lambda: llm.runner.generate([[1]], sampling_config=params),
    }
    with pytest.raises(RequestError, match=error.__name__):
        ways[asked_through]()
    assert len(llm.generate("1", SHORT)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.runner.generate([[1]], max_new_tokens=40),
        lambda llm: list(llm.runner.generate([[1]], max_new_tokens=40, streaming=True)),
        lambda llm: llm.generate("1", dataclasses.replace(SHORT, max_tokens=40)),
        lambda llm: complete_text(llm.runner, llm.tokenizer, [TextRequest(prompt=[1], params=SHORT)]),
    ],
)
def test_an_interrupt_ends_the_wait_of_the_main_thread_and_its_request(
    llm: EngineLLM, session: FakeSession, call: Callable[[EngineLLM], object]
) -> None:
    """While a step computes, which goes on."""
    interrupted, main = threading.Event(), threading.get_ident()

    def interrupt(batch: StepBatch) -> None:
        session.before_step = lambda batch: None
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(20)

    session.before_step = interrupt
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(llm)
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.stats()["requests_running"] == llm.stats()["blocks_used"] == 0
    assert llm.runner.generate([[1]], max_new_tokens=2).shape == (1, 1, 3)


@pytest.mark.slow
def test_an_iterator_keeps_its_llm_open(session: FakeSession, tmp_path: Path) -> None:
    model = make_model()
    model = dataclasses.replace(model, plan=dataclasses.replace(model.plan, vocab_size=VOCAB))

    async def ask() -> list[Any]:
        llm = EngineLLM(make_runner(model, session), byte_tokenizer(tmp_path, VOCAB))
        outputs = llm.generate_async("1", SHORT)
        del llm
        return [each async for each in outputs]

    assert asyncio.run(ask())[-1].finished
    gc.collect()
    assert session.closed


def test_a_panic_of_the_tokenizer_ends_its_request_alone(llm: EngineLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As the tokenizer's library raises them."""

    def panic(*arguments: object, **values: object) -> str:
        raise PanicError("index out of bounds")

    async def read() -> None:
        await anext(llm.generate_async([1, 2], SHORT))

    for use in (lambda: asyncio.run(read()), lambda: llm.generate([1, 2], SHORT)):
        with monkeypatch.context() as patched:
            patched.setattr("ingot.runtime.tokenizer.Detokenizer.push", panic)
            with pytest.raises(RequestError, match="index out of bounds"):
                use()
    assert len(llm.generate("1", SHORT)[0].outputs[0].token_ids) == 3


_STUCK = """
import threading, time
from ingot.configs.sampling import SamplingParams
from ingot.plugins.registry import find_target
from tests.runtime.tiny_engine import make_runner, open_session
from tests.runtime.tiny_plan import make_model

inside = threading.Event()

def stuck(logits):
    inside.set()
    time.sleep(1000)

target = find_target("cpu")
model = make_model(target)
runner = make_runner(model, open_session(model, target, 100))
params = SamplingParams(logits_processors=[stuck])
threading.Thread(target=lambda: runner.generate([[1]], sampling_config=params), daemon=True).start()
assert inside.wait(60)
"""


@pytest.mark.slow
@pytest.mark.native
def test_a_process_ends_in_silence_while_a_thread_is_inside_a_step() -> None:
    done = subprocess.run([sys.executable, "-c", _STUCK], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
