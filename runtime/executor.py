"""One thread runs all steps of an engine; everybody else asks it by one queue and reads the answers from their own.

callers        add, abort, close ──▶ [commands] ──▶ engine thread: StepLoop ──▶ Outlet of the request ──▶ its reader

Requests of all callers share every step. What is asked while a step computes is done when it ends. The thread ends with
`close`, and sleeps while there is nothing to do.

No lock decides who comes first, a request or `close`: the thread answers every command that it finds in the queue, also
after it has ended the loop, which fails requests then. A command that comes later still finds `over` set.
"""

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ingot.errors import IngotError, RankError, RequestError
from ingot.plugins.target import RankSession
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.drafts.drafting import Drafting
from ingot.runtime.outlet import Outlet
from ingot.runtime.owned import Owned, start_thread
from ingot.runtime.reports import Beat, Stats, StepReport, Work
from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Session

Result = TypeVar("Result")

_CLOSED = "the runner was closed before the request ended"


class _EngineThread(threading.Thread):
    """Owns the loop. It does not know the executor, which may be dropped while it sleeps.

    over     no command is taken any more, and nothing changes in the loop
    failure  why it ended though nobody closed it, in words
    """

    def __init__(self, loop: StepLoop) -> None:
        super().__init__(name="ingot engine", daemon=True)
        self._loop = loop
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.over = False
        self.failure: str | None = None
        self.beat = Beat(at=time.monotonic(), busy=False, stats=loop.stats())

    def ask(self, command: Callable[[], None] | None) -> None:
        """Have a command done between two steps, after all those before it. None: close. Waits for nothing."""
        self._commands.put(command)
        self._loop.stop[0] = 1

    def run(self) -> None:
        """For the thread."""
        try:
            self._serve()
            self._loop.close(RequestError(_CLOSED))
        except RankError as error:
            self.failure = str(error)
            self._loop.die(error)
        except BaseException as error:  # those who wait for tokens must not wait for ever
            self.failure = f"the engine thread has died, which is a bug of ingot: {error!r}"
            self._loop.die(RequestError("the engine thread has failed", got=repr(error)))
            raise
        finally:
            self._beat(busy=False)
            self.over = True  # before the last look at the queue: who asks after that look, sees it
            while not self._commands.empty():
                command = self._commands.get()
                if command is not None:
                    command()
            self._loop.close(RequestError(_CLOSED))  # also where the loop died

    def _serve(self) -> None:
        loop, commands = self._loop, self._commands
        while True:
            loop.stop[0] = 0  # before the look at the queue: what comes after it stops the next step
            while not loop.has_work or not commands.empty():
                command = commands.get()
                if command is None:
                    return
                command()
                del command  # while this thread sleeps, memory that it has copied to must not wait for the next one
                self._beat(busy=loop.has_work)
            loop.step()
            self._beat(busy=loop.has_work)

    def _beat(self, *, busy: bool) -> None:
        self.beat = Beat(at=time.monotonic(), busy=busy, stats=self._loop.stats())


class Executor(Owned):
    """Thread-safe. `session` belongs to the executor: `close` closes it.

    A step calls logits processors: on their thread, what would wait for that very step raises RequestError.
    """

    def __init__(
        self, session: Session, scheduler: Scheduler, blocks: BlockManager, drafting: Drafting | None = None
    ) -> None:
        """Start the thread. Raises RequestError if the system has none; `session` is closed then."""
        super().__init__()
        self._loop = StepLoop(session, scheduler, blocks, drafting)
        self._ranks = session if isinstance(session, RankSession) else None
        self._engine = _EngineThread(self._loop)
        self._closed = False
        try:
            start_thread(self._engine)
        except RequestError as error:
            self._loop.close(error)
            raise
        weakref.finalize(self, self._engine.ask, None).atexit = False

    @property
    def beat(self) -> Beat:
        """How things stood between the last two steps; waits for nothing."""
        return self._engine.beat

    @property
    def failure(self) -> str | None:
        """Why no step will follow though nobody closed the executor, in words."""
        return self._engine.failure or (None if self._ranks is None else _lost_rank(self._ranks))

    def report_to(self, on_step: Callable[[StepReport], None]) -> None:
        """Have every step told, on the engine thread: `on_step` must be quick."""
        self._loop.on_step = on_step

    def add(self, requests: Iterable[Request], outlet: Outlet) -> None:
        """Queue requests; `outlet` gets what steps bring them. Raises, before any is queued, if one can never run."""
        self.require_here()
        requests = list(requests)
        self._loop.require_fits(requests)
        if self._closed or self._engine.over:
            raise RequestError("the runner is closed", got=self.failure, hint="make a new one")
        self._engine.ask(functools.partial(self._loop.add, requests, outlet))
        if self._engine.over:
            raise RequestError("the runner was closed before the request began", got=self.failure)

    def abort(self, requests: Iterable[Request], error: IngotError | None = None) -> None:
        """End requests after the step that runs. Finished ones stay as they are. Waits for nothing and takes no lock.

        error  why, for those who wait for them and have not asked for this
        """
        if self.is_here and (running := [request for request in requests if not request.finished]):
            self._engine.ask(functools.partial(self._loop.abort, running, error))

    def complete(self, requests: Sequence[Request]) -> None:
        """Queue requests and wait until every one has ended. If the wait is interrupted, they are aborted."""
        self.require_ready()
        outlet, left = Outlet(every_step=False), len(requests)
        try:
            self.add(requests, outlet)
            while left:
                left -= len(outlet.get())
        finally:
            self.abort(requests)

    def require_ready(self) -> None:
        """Raise RequestError where nobody may wait for a step: in a forked child, and inside a step."""
        self.require_here()
        if threading.current_thread() is self._engine:
            raise RequestError(
                "a logits processor cannot use the runner that calls it: the step would wait for itself",
                hint="use another runner in it, or ask before or after the request",
            )

    def close(self) -> None:
        """After the step that runs, fail every request that has not ended, end the thread and release the session.
        Closing twice is fine. In a forked child nothing is to be done: memory goes with the process.
        """
        if not self.is_here:
            return
        self.require_ready()
        self._closed = True
        self._engine.ask(None)
        self._engine.join()

    def stats(self) -> Stats:
        """How things stand after all that was asked for before: waits for the step that runs. See `beat`."""
        return self.between_steps(self._loop.stats)

    def work(self) -> Work:
        """What has been done so far, that of the step that runs included: waits for it."""
        return self.between_steps(lambda: self._loop.work)

    def step_log(self) -> list[list[int]]:
        """[prefill tokens, decode rows] of each step, the most recent 100,000, and that of the step that runs."""
        return self.between_steps(self._loop.step_log)

    def between_steps(self, work: Callable[[], Result]) -> Result:
        """What `work` gives or raises on the engine thread, or here once that has ended."""
        self.require_here()
        if threading.current_thread() is not self._engine:
            answer: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()
            self._engine.ask(lambda: answer.put(_outcome(work)))
            if not self._engine.over:  # then it takes the command, if only as one of its last
                return answer.get()()
            self._engine.join()
            if not answer.empty():
                return answer.get()()
        return work()

    def while_still(self, work: Callable[[], Result]) -> Result:
        """The same while no pipeline stage computes, either: what is under way has ended then."""

        def settled() -> Result:
            self._loop.settle()
            return work()

        return self.between_steps(settled)


def _outcome(work: Callable[[], Result]) -> Callable[[], Result]:
    """Gives or raises, on the thread that asked, what `work` gave or raised on this one."""
    try:
        result = work()
    except Exception as error:
        failure = error

        def fail() -> Result:
            raise failure

        return fail
    return lambda: result


def _lost_rank(session: RankSession) -> str | None:
    """Why no step can follow, where another rank has ended. From any thread; waits for nothing."""
    try:
        session.require_ranks()
    except RankError as error:
        return str(error)
    return None
