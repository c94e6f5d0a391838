"""A load on an engine: over HTTP where it has a server of its own, else within its process. One fresh process a run."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from socket import socket
from typing import IO

from ingot.bench.http_client import Answer, Client
from tests.peers.adapters.protocol import Job
from tests.peers.load import WARMING, Fate, Load, Run, hopeless
from tests.peers.peers import Peer, Serving
from tests.peers.steps import adapter_command, adapter_environment, last_words

_START, _STOP, _REQUEST = 1800, 60, 86_400  # seconds until it answers, until it has ended, of one request
_LOOK = 0.05  # seconds between two looks at what has come


class FailedError(ValueError):
    """An engine's process ended badly, or does not answer; its last words."""


def run_load(peer: Peer, job: Job, caps: Mapping[str, str], load: Load) -> Run:
    """Raises FailedError."""
    if peer.serving is Serving.STEPS:
        return Run.from_json(ask(peer, "load", job, caps, load.as_json()))
    with _server(peer, job, caps) as (url, process):
        return asyncio.run(_serve_load(url, process, load))


def ask(peer: Peer, action: str, job: Job, caps: Mapping[str, str], text: str = "", timeout: float = _REQUEST) -> str:
    """What the adapter prints, with `text` on its stdin. Raises FailedError, and SubprocessError beyond the timeout."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            adapter_command(peer, action, job),
            env=adapter_environment(peer, job.threads, caps),
            cwd=job.work,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(text, timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the programs that it has started, too
            process.wait()
            raise
        if process.returncode != 0:
            raise FailedError(f"{action} failed: {_words(log)}")
    return answer


async def drive(client: Client, load: Load) -> Run:
    """Every request when it is due; what still runs when the run is given up is dropped."""
    return await _Drive(client, load).run()


class _Drive:
    def __init__(self, client: Client, load: Load) -> None:
        self._client, self._load = client, load
        self._asked: dict[int, tuple[float, Answer]] = {}
        self._begin = time.perf_counter()

    async def run(self) -> Run:
        everything = asyncio.create_task(self._everything())
        while not everything.done() and not hopeless(self._load, self._fates(), self._now()):
            await asyncio.wait([everything], timeout=_LOOK)
        complete, seconds = everything.done(), self._now()
        everything.cancel()
        await asyncio.gather(everything, return_exceptions=True)
        return Run(fates=self._fates(), complete=complete, seconds=seconds)

    async def _everything(self) -> None:
        if self._load.arrivals is not None:
            await asyncio.gather(*(self._request(number, due) for number, due in enumerate(self._load.arrivals)))
        else:
            for number in range(len(self._load.prompts)):
                await self._request(number, self._now())

    async def _request(self, number: int, due: float) -> None:
        await asyncio.sleep(max(due - self._now(), 0))
        answer = Answer(start=0.0)
        self._asked[number] = due, answer
        await _complete(self._client, self._load.prompts[number], self._load.outputs[number], answer)

    def _fates(self) -> list[Fate]:
        return [
            _fate(answer, self._begin, due, self._load.outputs[number]) for number, (due, answer) in self._asked.items()
        ]

    def _now(self) -> float:
        return time.perf_counter() - self._begin


async def _complete(client: Client, prompt: Sequence[int], tokens: int, answer: Answer) -> None:
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    await client.stream("/completions", body, _REQUEST, answer)


def _fate(answer: Answer, begin: float, due: float, wanted: int) -> Fate:
    """So far. Tokens that make no whole character come with a later piece, if at all; the end tells how many came."""
    fate = Fate(due=due, ended=answer.end > 0, error=answer.error)
    if answer.pieces:
        fate.token(answer.pieces[0] - begin)
        fate.token(answer.pieces[-1] - begin, max(answer.tokens, len(answer.pieces)) - 1)
    elif fate.ended and answer.tokens:
        fate.token(answer.end - begin, answer.tokens)
    if fate.ended and fate.error is None and answer.tokens != wanted:
        fate.error = f"{answer.tokens} tokens came, of {wanted}"
    return fate


async def _serve_load(url: str, process: subprocess.Popen[bytes], load: Load) -> Run:
    async with Client(url, None, keep_alive=False) as client:
        prompts, tokens = WARMING
        end = time.perf_counter() + _START
        for prompt in prompts:
            answer = Answer(start=0.0, error="no answer yet")
            while answer.error is not None:
                if process.poll() is not None or time.perf_counter() > end:
                    raise FailedError(f"the server does not answer: {answer.error}")
                answer = Answer(start=0.0)
                await _complete(client, prompt, tokens, answer)
                await asyncio.sleep(_LOOK)
        return await drive(client, load)


@contextlib.contextmanager
def _server(peer: Peer, job: Job, caps: Mapping[str, str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that has just been started, on a free port; its last words if it ends by itself."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [*adapter_command(peer, "serve", job), str(port)],
            env=adapter_environment(peer, job.threads, caps),
            cwd=job.work,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{port}", process
            if process.poll() is not None:
                raise FailedError("the server has ended")
        except FailedError as error:
            raise FailedError(f"{error}; it said: {_words(log)}") from error
        finally:
            process.terminate()
            try:
                process.wait(_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _words(log: IO[str]) -> str:
    log.seek(0)
    return last_words(log.read())
