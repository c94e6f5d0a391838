"""The loop: every request of a process goes through one Executor, whoever sent it.

    add ──▶ waiting ──schedule──▶ running ──step──▶ one more token ──▶ ... ──▶ finished
              ▲                      │
              └─────── preempt ──────┘            abort: from anywhere, blocks come back at once

There is no thread of its own: a caller that waits for news runs the next step, unless another caller is running one;
then it waits for that step. Requests of all callers share every step. While a step computes, others can add and abort.

Short steps follow each other inside the session where it can repeat them: as long as nobody comes or goes, the requests
that decode are the same in the next step, and the host's work between steps would cost small models more than it gives.
Meanwhile those that wait for tokens look at them now and then, and do their own work beside the kernels.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypedDict, TypeVar

import numpy as np

from ingot.errors import CapacityError, IngotError, RequestError
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.owned import Owned
from ingot.runtime.repetition import Repetition
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.run_step import Outcome, run_step
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_batch import ScheduledStep, assemble, count_kinds, keep_results, unfit
from ingot.step_io import RepeatSession, Session, StepResult

Result = TypeVar("Result")

_LOG = logging.getLogger("ingot.runtime")
_CLOSED = "the runner was closed before the request ended"
_STEP_LOG_LENGTH = 100_000  # the most recent steps
_LONG_STEP = 0.012  # seconds: of longer steps the host takes less than 3 %, and they go singly
_REPEAT_SECONDS = 0.25  # no step follows when so much has gone by
_MAX_REPEATS = 128  # keeps the blocks that are reserved ahead few
_LOOK_SECONDS = 0.032  # steps that follow each other are looked at so often


class Stats(TypedDict):
    """blocks_used + blocks_cached + free ones = blocks_total. All below requests_waiting count from the beginning.

    blocks_cached         held by nobody, kept for their contents
    prefix_hit_tokens     prompt tokens that were not computed, for their blocks were there
    preemptions           the sum of the two reasons:
    preempted_for_others  a request before it needed a block
    preempted_for_itself  it needed a block, and nobody came after it
    preempted_tokens      their cost: tokens computed again because of preemptions
    """

    blocks_total: int
    blocks_used: int
    blocks_cached: int
    requests_running: int
    requests_waiting: int
    preemptions: int
    preempted_for_others: int
    preempted_for_itself: int
    preempted_tokens: int
    prefix_hit_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step. Seconds by phase: choosing and laying out the tokens, the session, handing out the results; of steps
    that came at a time, each has its share.
    """

    prefill_tokens: int
    decode_rows: int
    schedule_seconds: float
    session_seconds: float
    finish_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """So far: steps, and the time they were in the session. The rest of a busy executor's time is the host's work."""

    steps: int = 0
    session_seconds: float = 0.0


def _require_fits(request: Request, blocks: BlockManager) -> None:
    """Raises CapacityError for a request that not even an empty cache holds."""
    needed = blocks.blocks_for(request.max_cached_tokens)
    if needed > blocks.num_blocks:
        raise CapacityError(
            "the KV cache is too small for this request",
            expected=f"at most {blocks.num_blocks} blocks of {blocks.tokens_per_block} tokens",
            got=f"{request.max_cached_tokens} tokens, {needed} blocks",
            hint="pass a larger kv_cache_memory or a smaller max_new_tokens",
        )


class Executor(Owned):
    """Thread-safe. `session` belongs to the executor: `close` closes it.

    A step calls logits processors: on their thread, what would wait for that very step raises RequestError.

    on_step  is told of every step, with the lock held: it must be quick
    """

    def __init__(self, session: Session, scheduler: Scheduler, blocks: BlockManager) -> None:
        super().__init__()
        self._session, self._scheduler, self._blocks = session, scheduler, blocks
        self._turn = threading.Condition()
        self._stepper: int | None = None  # the thread that runs a step now
        self._closed = self._released = False
        self._arrivals = 0
        self._work = Work()
        self._repeater = session if isinstance(session, RepeatSession) else None
        self._stop = np.zeros(1, dtype=np.int32)  # see Repeat
        self._repeats = 1  # how many steps may follow each other
        self._repetition: Repetition | None = None  # while the session is in it
        self._steppers: list[threading.Thread] = []  # those in run_until, or lately there
        self.on_step: Callable[[StepReport], None] | None = None
        self._last: ScheduledStep | None = None
        self._steps: deque[tuple[int, int]] = deque(maxlen=_STEP_LOG_LENGTH)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raises, before any is queued, if one can never run."""
        self.require_here()
        requests = list(requests)
        for request in requests:
            _require_fits(request, self._blocks)
        with self._turn:
            if self._closed:
                raise RequestError("the runner is closed", hint="make a new one")
            for request in requests:
                request.arrival = self._arrivals
                self._arrivals += 1
                self._scheduler.add(request)
            self._notify()

    def abort(self, requests: Iterable[Request], error: IngotError | None = None) -> None:
        """End requests now; their blocks are free when this returns. Finished ones stay as they are.

        error  why, for whoever waits for them and has not asked for this
        """
        if not self.is_here:
            return  # nothing runs here, and the lock may never come free
        with self._turn:
            self._abort(requests, error)
            self._notify()

    def require_ready(self) -> None:
        """Raise RequestError where nobody may ask for a step: in a forked child, and inside a step."""
        self.require_here()
        if self._stepper == threading.get_ident():
            raise RequestError(
                "a logits processor cannot use the runner that calls it: the step would wait for itself",
                hint="use another runner in it, or ask before or after the request",
            )

    def wait(self, ready: Callable[[], bool], result: Callable[[], Result], *, steps: bool = True) -> Result:
        """`result()` as soon as `ready()` holds, running steps meanwhile; no step changes anything in between.

        `ready()` must become true while requests advance or end. steps: False leaves the steps to other threads.
        """
        self.require_ready()
        with self._turn:
            while not ready():
                if self._stepper is not None or self._closed or not steps:
                    self._look()
                else:
                    self._step()
            found = result()
            if not steps:
                self._turn.notify_all()  # who has got what there was may have been waited for: see `run_until`
            return found

    def step(self) -> bool:
        """Run a step, or several short ones, or wait for what is running; False if there was nothing to do."""
        self.require_ready()
        with self._turn:
            if self._stepper is not None:
                self._turn.wait()
                return True
            if self._closed or not self._scheduler.has_work:
                return False
            self._step(seconds=_LOOK_SECONDS)
            return True

    def run_until(self, stop: Callable[[], bool], most: Callable[[], int] = lambda: _MAX_REPEATS) -> None:
        """Run steps while there are requests, sleep while there are none; for a thread of its own. See `wake`.

        most  how many steps may follow each other now; 0: none before somebody has taken a result of `wait`
        """
        self.require_ready()
        with self._turn:
            self._steppers = [*(each for each in self._steppers if each.is_alive()), threading.current_thread()]
            while not (self._closed or stop()):
                if self._stepper is not None or not self._scheduler.has_work or not (allowed := most()):
                    self._turn.wait()
                else:
                    self._step(allowed)

    def wake(self) -> None:
        """Have every waiting thread look again at what it waits for."""
        if self.is_here:
            with self._turn:
                self._notify()

    def drain(self) -> None:
        """Run until every request has ended."""
        while self.step():
            pass

    def close(self) -> None:
        """Wait for the running step and the threads that run steps, fail every request that has not ended, release the
        session. Closing twice is fine. In a forked child nothing is to be done: memory goes with the process.
        """
        if not self.is_here:
            return
        self.require_ready()
        with self._turn:
            self._closed = True
            self._notify()
            while self._stepper is not None:
                self._turn.wait()
            if not self._released:
                self._abort([*self._scheduler.running, *self._scheduler.waiting], RequestError(_CLOSED))
                self._notify()
                self._session.close()
                self._released = True
            steppers, self._steppers = self._steppers, []
        for thread in steppers:  # they hold the session, whose memory is to be free
            if thread is not threading.current_thread():
                thread.join()

    def stats(self) -> Stats:
        """Where things stand now."""
        self.require_here()
        with self._turn:
            return Stats(
                blocks_total=self._blocks.num_blocks,
                blocks_used=self._blocks.num_used,
                blocks_cached=self._blocks.num_cached,
                requests_running=len(self._scheduler.running),
                requests_waiting=len(self._scheduler.waiting),
                preemptions=self._scheduler.preemptions,
                preempted_for_others=self._scheduler.preempted_for_others,
                preempted_for_itself=self._scheduler.preempted_for_itself,
                preempted_tokens=self._scheduler.preempted_tokens,
                prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
            )

    def work(self) -> Work:
        """What has been done so far."""
        self.require_here()
        with self._turn:
            return self._work

    def step_log(self) -> list[list[int]]:
        """[prefill tokens, decode rows] of each step, the most recent 100,000."""
        self.require_here()
        with self._turn:
            return [list(counts) for counts in self._steps]

    def _notify(self) -> None:
        """Something has changed: whoever waits looks again, and the step that runs is the last of its kind."""
        self._stop[0] = 1
        self._turn.notify_all()

    def _look(self) -> None:
        """Sleep until something has changed; of steps that follow each other, take what has come by then."""
        self._turn.wait(None if self._repetition is None else _LOOK_SECONDS)
        if self._repetition is not None:
            self._repetition.catch_up()

    def _step(self, most: int = _MAX_REPEATS, seconds: float = _REPEAT_SECONDS) -> None:
        """One step, or several: at most `most`, for about `seconds`. The lock is held, except while the session
        computes.
        """
        start = time.perf_counter()
        chunks = self._scheduler.schedule()
        assert chunks, "the oldest request can always advance"
        kinds = count_kinds(chunks)
        repeater = self._repeater
        most = 1 if repeater is None else self._scheduler.repeatable(chunks, min(most, self._repeats))
        step = self._last = assemble(chunks, self._last)
        repetition = None
        if repeater is not None and most > 1:
            repetition = Repetition(repeater, step, self._work.steps, most=most, seconds=seconds, stop=self._stop)
            self._repetition = repetition
            self._turn.notify_all()  # whoever sleeps has to look now and then
        self._stop[0] = 0
        self._stepper = threading.get_ident()
        self._turn.release()
        begin = time.perf_counter()
        try:
            outcomes = self._run(step) if repetition is None else self._repeat(step, repetition)
        finally:
            taken = time.perf_counter() - begin
            self._turn.acquire()
            self._stepper, self._repetition = None, None
            self._turn.notify_all()
        num_steps = 1  # also where it failed and everybody has gone meanwhile
        if repetition is not None:
            repetition.catch_up()
            num_steps = max(1, repetition.taken + bool(outcomes))
        for part, outcome in outcomes:
            self._finish_step(part, outcome, self._work.steps + num_steps - 1)
        self._work = Work(steps=self._work.steps + num_steps, session_seconds=self._work.session_seconds + taken)
        report = StepReport(
            prefill_tokens=kinds[0],
            decode_rows=kinds[1],
            schedule_seconds=(begin - start) / num_steps,
            session_seconds=taken / num_steps,
            finish_seconds=(time.perf_counter() - begin - taken) / num_steps,
        )
        for _ in range(num_steps):
            self._account(report)
        if not outcomes:
            self._repeats = 1
        if self._scheduler.pace is not None and len(outcomes) == 1:
            self._scheduler.pace.times.observe(sum(kinds), 1e3 * (time.perf_counter() - start) / num_steps)

    def _account(self, report: StepReport) -> None:
        self._steps.append((report.prefill_tokens, report.decode_rows))
        if self.on_step is not None:
            self.on_step(report)
        if not report.prefill_tokens:
            fitting = 1 + int(_REPEAT_SECONDS / max(report.session_seconds, 1e-6))
            self._repeats = 1 if report.session_seconds > _LONG_STEP else min(_MAX_REPEATS, fitting)

    def _repeat(self, step: ScheduledStep, repetition: Repetition) -> list[Outcome]:
        """The result of the last of several steps. If one fails it is tried alone, to see which request is at fault: at
        once if it was the first, else as the next step, and then there is no result here.
        """
        try:
            return [(step, repetition.run())]
        except Exception as error:
            _LOG.warning("several steps at a time failed, one is tried: %r", error)
            return [] if repetition.done else self._run(step)

    def _run(self, step: ScheduledStep) -> list[Outcome]:
        """The step's result; if it fails, each request alone, so that the one at fault fails alone.

        Computing a chunk again writes the same keys and values to the same slots.
        """
        try:
            return run_step(self._session, step)
        except Exception as error:
            if len(step.chunks) == 1:
                return [(step, _in_words(error))]
            _LOG.warning("a step failed, its requests are tried one by one: %r", error)
        with self._turn:  # an abort must not empty a block table in the middle
            parts = [assemble({request: count}) for request, count in step.chunks.items() if not request.finished]
        return [outcome for part in parts for outcome in self._run(part)]

    def _finish_step(self, step: ScheduledStep, outcome: StepResult | IngotError, number: int) -> None:
        """Move every request that nobody aborted meanwhile forward; the lock is held. number: of the step."""
        if isinstance(outcome, IngotError):
            self._fail(step.chunks, outcome)
            return
        for request, error in unfit(step, outcome):
            self._fail([request], error)
        keep_results(step, outcome)
        size = self._blocks.tokens_per_block
        for request, count in step.chunks.items():
            if request.finish_reason is None:
                request.num_computed = computed = request.num_computed + count
                if computed >= (request.blocks.sealed + 1) * size:
                    self._blocks.seal(request.blocks, request.tokens, computed)
        drawn = zip(step.sampled, outcome.ids.tolist(), outcome.log_probs.tolist(), strict=False)  # then the known ones
        for request, token, log_prob in drawn:
            if request.finish_reason is None:
                request.append(token, log_prob, number)
                if request.finish_reason is not None:
                    self._scheduler.remove(request)

    def _abort(self, requests: Iterable[Request], error: IngotError | None) -> None:
        if self._repetition is not None:
            self._repetition.catch_up()  # what was drawn before belongs to them
        for request in requests:
            self._end(request, error)

    def _fail(self, requests: Iterable[Request], error: IngotError) -> None:
        for request in requests:
            if not request.finished:
                self._blocks.forget(request.blocks)
                self._end(request, error)

    def _end(self, request: Request, error: IngotError | None) -> None:
        if not request.finished and request.arrival >= 0:
            request.error, request.finish_reason = error, FinishReason.ABORT
            self._scheduler.remove(request)


def _in_words(error: Exception) -> IngotError:
    return error if isinstance(error, IngotError) else RequestError("a step failed", got=repr(error))
