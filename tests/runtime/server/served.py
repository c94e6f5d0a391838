"""A server on a free port, in a thread of this process or in a process of its own, as tests want it."""

import asyncio
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import openai

from ingot.configs.generation import GenerationDefaults, read_generation_defaults
from ingot.configs.serve import ServeConfig
from ingot.plugins.cpu.session import CpuSession
from ingot.runtime.answers.answer_formats import AnswerFormats
from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.server.connection import Connection
from ingot.runtime.server.http_server import HttpServer
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.service import Service
from ingot.runtime.tokenizer import Tokenizer

CONFIG = ServeConfig(port=0, model_names=("tiny",), stall_timeout=3.0, debug_hooks=True)
_START_SECONDS = 180  # that a process may take until it serves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """url: without /v1. service: touch it from its loop only, but for what is thread-safe."""

    url: str
    service: Service
    server: HttpServer
    loop: asyncio.AbstractEventLoop

    @property
    def runner(self) -> ModelRunner:
        return self.service.runner

    @property
    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [each for each in tuple(self.server.server_state.connections) if isinstance(each, Connection)]

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60, **options)

    def async_client(self) -> openai.AsyncOpenAI:
        """The official client, asynchronous."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60)

    def http(self, key: str | None = None) -> httpx.Client:
        """A plain client."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)

    @contextlib.contextmanager
    def slowly(self, seconds: float = 0.001) -> Iterator[None]:
        """Meanwhile every op of a step takes `seconds` longer, a token some 50 ms with 0.001: a long request does not
        end before somebody has looked at it."""
        session = self.runner.executor._loop._session
        assert isinstance(session, CpuSession)
        session.slow_down(seconds)
        try:
            yield
        finally:
            session.slow_down(0)

    def is_between_steps(self) -> bool:
        """No step is under way, not even of requests that have been aborted."""
        return not self.runner.executor.beat.busy

    def is_empty(self) -> bool:
        """Nothing runs, and no block is held."""
        stats = self.runner.stats()
        return not (stats["blocks_used"] or stats["requests_running"] or stats["requests_waiting"])


@contextlib.contextmanager
def serving(
    runner: ModelRunner, tokenizer: Tokenizer, config: ServeConfig = CONFIG, directory: Path | None = None
) -> Iterator[Served]:
    """A server in a thread; it closes the runner. directory: with chat templates and generation_config.json."""
    templates = ChatTemplates.from_dir(directory or Path("nowhere"), config.chat_template)
    formats = AnswerFormats.find(templates.texts.values(), tokenizer, config.tool_parser, config.reasoning_parser)
    defaults = GenerationDefaults() if directory is None else read_generation_defaults(directory)
    started: list[Served] = []
    listening = threading.Event()

    async def run() -> None:
        service = Service(runner, tokenizer, templates, formats, defaults, config, Metrics())

        def on_start(host: str, port: int) -> None:
            url = f"http://{host}:{port}"
            started.append(Served(url=url, service=service, server=server, loop=asyncio.get_running_loop()))
            listening.set()

        server = HttpServer(service, on_start)
        await server.serve()
        await asyncio.to_thread(service.close)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert listening.wait(20)
    (served,) = started
    try:
        yield served
    finally:

        def end() -> None:
            served.server.should_exit = True

        served.loop.call_soon_threadsafe(end)
        thread.join(20)
        assert not thread.is_alive(), "the server does not end"


@contextlib.contextmanager
def serving_engine(engine: Path, config: ServeConfig = CONFIG, **options: Any) -> Iterator[Served]:
    """An engine directory. options: of ModelRunner.from_dir."""
    runner = ModelRunner.from_dir(engine, **options)
    with serving(runner, Tokenizer.from_dir(engine), config, engine) as served:
        yield served


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it ever holds; `seconds` are there to end a test that fails, on a machine that has much else to do."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class ServeProcess:
    """`ingot serve` as users start it. before: words of its command line. url: where it listens."""

    def __init__(self, engine: Path, options: Sequence[object] = (), before: Sequence[str] = ()) -> None:
        served = ["serve", "--engine_dir", str(engine), "--port", "0", *map(str, options)]
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "ingot", *served],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        late = threading.Timer(_START_SECONDS, self.process.kill)  # what it has said until then is in the failure
        late.start()
        try:
            for line in self.process.stderr:
                self.lines.append(line)
                if found := re.search(r"at (http://\S+)", line):
                    self.url = found[1]
                    break
            else:
                raise AssertionError("".join(self.lines))
        finally:
            late.cancel()
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _read(self, said: IO[str]) -> None:
        """All that follows. A process that it has started may hold the pipe after its own end."""
        with said:
            self.lines.extend(said)

    def __enter__(self) -> "ServeProcess":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)

    def wait(self, seconds: float = 20) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    @property
    def err(self) -> str:
        """What it said."""
        return "".join(self.lines)
