"""Whether all ranks are still there, while a GPU waits for those of others.

A kernel of NCCL waits for ever for a rank that is gone, and the host waits for the kernel. So a thread looks twenty
times a second. Where a rank has ended, has failed or is late, the thread tells all ranks, and ends what NCCL has under
way.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from ingot.errors import IngotError, RankError, TargetError
from ingot.plugins.cpu.native import _cpu
from ingot.plugins.cpu.ranks import rank_failure
from ingot.plugins.cuda.nccl import Communicator

_LOOK = 0.05  # seconds between two looks
_MOST_OF_A_LOOK = 0.1  # that count: a process that looks later has been stopped, or waits for a core
_SILENT = 1.0  # seconds without a sign of a process that is stopped
_NAMING = 1.0  # seconds in which the end of a process may show, once NCCL has lost it


class RankWatch:
    """Looks after one rank. timeout: seconds that a step may take on the GPU."""

    def __init__(self, group: "_cpu.RankGroup", timeout: float) -> None:
        self._group, self._timeout = group, timeout
        self._communicators: list[Communicator] = []
        self._aborting: list[threading.Thread] = []
        self._step, self._waited, self._busy = 0, 0.0, False
        self._beats: list[int] = []
        self._silent: list[float] = []
        self._lost: RankError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ingot ranks", daemon=True)
        self._thread.start()

    def add(self, communicator: Communicator) -> None:
        """One that is to be aborted where a rank is lost."""
        self._communicators.append(communicator)

    def require_all(self) -> None:
        """Raises RankError where a rank is lost. From the thread that waits."""
        if self._lost is not None:
            raise self._lost

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Inside, this rank enqueues a step and waits for it. Raises RankError for whatever goes wrong: the other ranks
        are in the same step."""
        self._step, self._waited, self._busy = self._step + 1, 0.0, True
        try:
            yield
            self.require_all()  # what an aborted step has written has no meaning
        except RankError:
            raise
        except IngotError as error:
            raise self._blame(error) from error
        except BaseException as error:
            self.fail(f"rank {self._group.rank} was interrupted: {type(error).__name__}")
            raise
        finally:
            self._busy = False

    def fail(self, words: str) -> RankError:
        """Tell all ranks, and end what is under way here. Gives the first words that a rank said."""
        self._group.fail(words)
        try:
            self._group.require_all()
        except _cpu.RankError as error:
            words = str(error)
        self._lost = self._lost or rank_failure(words)
        self.abort()
        return self._lost

    def abort(self) -> list[threading.Thread]:
        """End what NCCL has under way. The threads that do so end once the session has destroyed its graphs."""
        threads = [threading.Thread(target=_abort, args=(each,), daemon=True) for each in self._communicators]
        for thread in threads:
            thread.start()
        self._aborting += threads
        return self._aborting

    def close(self) -> None:
        """No step follows."""
        self._ended.set()
        self._thread.join()

    def _blame(self, error: IngotError) -> RankError:
        """Where NCCL's call failed because of another rank, that rank's end shows soon."""
        end = time.monotonic() + _NAMING
        while isinstance(error, TargetError) and self._lost is None and time.monotonic() < end:
            time.sleep(_LOOK)
        return self._lost or self.fail(f"rank {self._group.rank}: {error}")

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(_LOOK) and self._lost is None:
            now = time.monotonic()
            passed, before = min(now - before, _MOST_OF_A_LOOK), now
            self._group.beat()
            self._listen(passed)
            if self._busy and (words := self._problem(passed)) is not None:
                self.fail(words)

    def _listen(self, passed: float) -> None:
        beats = self._group.beats()
        known = self._silent or [0.0] * len(beats)
        same = [one == other for one, other in zip(self._beats or beats, beats, strict=True)]
        self._silent = [silent + passed if still else 0.0 for silent, still in zip(known, same, strict=True)]
        self._beats = beats

    def _problem(self, passed: float) -> str | None:
        rank, step = self._group.rank, self._step
        try:
            self._group.require_all()
        except _cpu.RankError as error:
            return str(error) if self._group.failed else f"{error}; rank {rank} waited for it on its GPU at step {step}"
        try:
            for communicator in self._communicators:
                communicator.require_well()
        except TargetError as error:
            return f"rank {rank} at step {step}: {error.what}: {error.got}"
        self._waited += passed
        if self._waited <= self._timeout:
            return None
        seconds = int(self._waited)
        silent = next((other for other, time in enumerate(self._silent) if time > _SILENT and other != rank), None)
        if silent is not None:
            return f"rank {silent} did not come to step {step}: rank {rank} waited {seconds} s on its GPU"
        return f"step {step} has not ended on the GPU of rank {rank} after {seconds} s"


def _abort(communicator: Communicator) -> None:
    with contextlib.suppress(TargetError):
        communicator.abort()
