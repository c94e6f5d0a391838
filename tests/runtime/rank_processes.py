"""Processes for the ranks of tests, where MPI would start those of users: they speak by pipes while an engine opens."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from ingot.configs.runtime import RuntimeConfig
from ingot.errors import IngotError, RankError
from ingot.plugins.cpu.session import CpuRankSession
from ingot.runtime import ModelRunner
from ingot.runtime.session import load_engine


class PipeLink:
    """pipes: of the first rank one to each of the others; of these one to the first."""

    def __init__(self, rank: int, count: int, pipes: Sequence[Connection]) -> None:
        self.rank, self.count, self._pipes = rank, count, pipes

    def exchange(self, said: Any) -> list[Any]:
        try:
            if self.rank:
                self._pipes[0].send(said)
                found: list[Any] = self._pipes[0].recv()
                return found
            heard = [said, *(pipe.recv() for pipe in self._pipes)]
            for pipe in self._pipes:
                pipe.send(heard)
            return heard
        except (EOFError, OSError) as error:
            raise RankError("another rank has ended") from error

    def mpi_calls(self, stages: int) -> None:
        """MPI has started nothing here."""

    def leave(self) -> None:
        """Nobody waits for the end of others here."""


def _nothing() -> None:
    """A process of CPU ranks is ready as it is."""


def _work(pipe: Connection, prepare: Callable[[], None]) -> None:
    """Takes one engine after another: (directory, config, rank, count, seconds that each kernel call lasts longer)."""
    prepare()
    follow = CpuRankSession.follow
    while True:
        try:
            directory, config, rank, count, delay = pipe.recv()
        except EOFError:
            return

        def slowly(session: CpuRankSession, delay: float = delay) -> None:
            session.slow_down(delay)
            follow(session)

        try:
            with mock.patch.object(CpuRankSession, "follow", slowly):
                load_engine(directory, config, PipeLink(rank, count, [pipe]))
        except SystemExit:
            pipe.send(None)
        except IngotError as error:
            pipe.send(str(error))


class RankProcesses:
    """Of the ranks after the first.

    said     by the last call of `runner`: None of those that have ended well, else their words
    session  the first rank's
    """

    def __init__(self, count: int, prepare: Callable[[], None] = _nothing) -> None:
        """prepare: is called in each process first."""
        context = multiprocessing.get_context("spawn")
        self.said: list[str | None] = []
        self._pipes: list[Connection] = []
        self.processes = []
        for _ in range(count):
            here, there = context.Pipe()
            self._pipes.append(here)
            self.processes.append(context.Process(target=_work, args=(there, prepare), daemon=True))
            self.processes[-1].start()
            there.close()

    @contextlib.contextmanager
    def runner(
        self,
        engine: Path,
        ranks: int,
        config: RuntimeConfig | None = None,
        others: Path | None = None,
        delay: float = 0.0,
    ) -> Iterator[ModelRunner]:
        """The first rank's. others: the engine that the others open, where it is another one; delay: seconds that each
        of their kernel calls lasts longer."""
        config, pipes = config or RuntimeConfig(rank_timeout=20), self._pipes[: ranks - 1]
        for index, pipe in enumerate(pipes):
            pipe.send((others or engine, config, index + 1, ranks, delay))
        try:
            loaded = load_engine(engine, config, PipeLink(0, ranks, pipes))
            self.session: Any = loaded.session
            with ModelRunner(loaded, config) as runner:
                yield runner
        finally:
            self.resume()
            self.said = [_heard(pipe) for pipe in pipes]

    def resume(self) -> None:
        """Of a test that has stopped a process, before it is asked what it says."""

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _heard(pipe: Connection) -> str | None:
    try:
        said: str | None = pipe.recv() if pipe.poll(20) else "it says nothing"
    except (EOFError, OSError):
        return "it has ended"
    return said
