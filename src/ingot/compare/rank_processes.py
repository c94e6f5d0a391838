"""A process for each rank after the first, while an engine is compared: all of them on this machine, without MPI.

    this process: rank 0 ◀─ pipe ─▶ rank 1      while they open: what ranks exchange
                         ◀─ pipe ─▶ rank 2      then: the names of steps, and what these wrote in the next step

The steps themselves meet in shared memory, as those of a server do.
"""

import contextlib
import dataclasses
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ingot.engine import Engine, open_engine
from ingot.errors import IngotError, RankError
from ingot.plugins.registry import find_target
from ingot.plugins.target import JoinsRanks, RankSession, SessionOptions
from ingot.step_io import Ahead, Float32, Int32, SequenceRules, StepBatch, StepResult, TapSession

_TIMEOUT = 600.0  # seconds that a rank may be late: each has one thread
_ENDING = 20.0  # seconds that a process may take to end


class _PipeLink:
    """pipes: of the first rank one to each of the others; of these one to the first."""

    def __init__(self, rank: int, count: int, pipes: Sequence[Connection]) -> None:
        self.rank, self.count, self._pipes = rank, count, pipes

    def exchange(self, said: Any) -> list[Any]:
        """See `RankLink`."""
        if self.rank:
            self._pipes[0].send(said)
            heard: list[Any] = self._pipes[0].recv()
            return heard
        heard = [said, *(_hear(rank, pipe) for rank, pipe in enumerate(self._pipes, 1))]
        for pipe in self._pipes:
            pipe.send(heard)
        return heard

    def mpi_calls(self, stages: int) -> None:
        """MPI has started nothing here."""

    def leave(self) -> None:
        """No launcher waits for the end of all."""


def _hear(rank: int, pipe: Connection) -> Any:
    """What a rank says. Raises RankError for its last words."""
    try:
        said = pipe.recv()
    except (EOFError, OSError) as error:
        raise RankError(f"the process of rank {rank} has ended") from error
    if isinstance(said, RankError):
        raise said
    return said


class RankProcesses:
    """A session of all ranks, behind `RanksTapSession`. engine: the first rank's."""

    most_steps = 1
    takes_drafts = False

    def __init__(self, target: JoinsRanks, engine: Engine, options: SessionOptions) -> None:
        """Raises RankError, and as `open_session`."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        ranks, self.num_blocks = engine.manifest.ranks, options.num_blocks
        options = _of_rank(options, threads=None if target.on_gpu else 1)
        with contextlib.ExitStack() as opened:
            opened.callback(self._end)
            for rank in range(1, ranks):
                self._start()
                own = dataclasses.replace(options, local=(rank, ranks))
                self._pipes[-1].send((engine.directory, target.name, rank, ranks, own))
            link = _PipeLink(0, ranks, self._pipes)
            session = target.open_rank(
                engine.plan, engine.weights, dataclasses.replace(options, local=(0, ranks)), link
            )
            opened.callback(session.close)  # before the others end
            assert isinstance(session, TapSession), "a target whose ranks can be looked at"
            self._first: Any = session
            self._opened = opened.pop_all()

    def _start(self) -> None:
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", __name__, str(there.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL))
        self._pipes.append(Connection(here.detach()))

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One step, without a look inside."""
        for pipe in self._pipes:
            pipe.send(())
        result: StepResult = self._first.run(batch)
        for rank, pipe in enumerate(self._pipes, 1):
            _hear(rank, pipe)
        return result

    def run_ranks_tapped(
        self, batch: StepBatch, steps: Sequence[Sequence[str]]
    ) -> Sequence[Mapping[str, Mapping[str, Float32]]]:
        """See `RanksTapSession`. Raises RankError."""
        for pipe, names in zip(self._pipes, steps[1:], strict=True):
            pipe.send(tuple(names))
        _, own = self._first.run_tapped(batch, steps[0])
        return [own, *(_hear(rank, pipe) for rank, pipe in enumerate(self._pipes, 1))]

    def read_rank_kv(self, rank: int, layer: int, block: int) -> tuple[Float32, Float32]:
        """See `RanksTapSession`. Raises RankError."""
        found: tuple[Float32, Float32]
        if rank == 0:
            found = self._first.read_kv(layer, block)
        else:
            self._pipes[rank - 1].send((layer, block))
            found = _hear(rank, self._pipes[rank - 1])
        return found

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Never called: nothing is drawn."""
        raise AssertionError("a comparison draws nothing")

    def end(self, slot: int) -> None:
        """Nothing is held."""

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Never called: nothing is drawn."""
        raise AssertionError("a comparison draws nothing")

    def close(self) -> None:
        """End the processes."""
        self._opened.close()

    def _end(self) -> None:
        """A process whose pipe is closed ends by itself, unless it hangs."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _of_rank(options: SessionOptions, threads: int | None) -> SessionOptions:
    """One thread on CPUs: the processes would keep each other from the same cores."""
    return dataclasses.replace(options, threads=threads, rank_timeout=_TIMEOUT)


def follow(pipe: Connection) -> None:
    """The life of a rank's process: opens its part, then computes a step whenever the first rank says so."""
    directory, name, rank, count, options = pipe.recv()
    try:
        target: Any = find_target(name)
        with open_engine(Path(directory), rank, target=name) as engine:
            link = _PipeLink(rank, count, [pipe])
            with contextlib.closing(target.open_rank(engine.plan, engine.weights, options, link)) as session:
                _answer(session, pipe)
    except IngotError as error:
        with contextlib.suppress(OSError):
            pipe.send(RankError(f"rank {rank} cannot be compared", got=str(error)))


def _answer(session: RankSession, pipe: Connection) -> None:
    """Until the pipe is closed. It says the names of steps, or a layer and a block of its cache."""
    with contextlib.suppress(EOFError):
        while True:
            asked = pipe.recv()
            if asked and isinstance(asked[0], int):
                assert isinstance(session, TapSession), "whose cache can be read"
                pipe.send(session.read_kv(*asked))
            else:
                pipe.send(session.follow_tapped(asked))


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as of_first:
        follow(of_first)
