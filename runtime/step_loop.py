"""The loop: scheduler, blocks and session, and the requests that go through them. It belongs to one thread.

    add ──▶ waiting ──schedule──▶ running ──step──▶ one more token ──▶ ... ──▶ finished
              ▲                      │                    │
              └─────── preempt ──────┘                    └──▶ the outlet that `add` was given

Nothing happens but in a call. `Executor` has a thread that makes these calls; tests make them by hand.

As long as nobody comes or goes, the requests that decode are the same in the next step. So

- sessions of a device submit it while the step before computes: the host's work costs no time,
- other sessions compute several short steps in one call: the host's work would cost small models much.

Pipeline stages compute several steps at once, each of other requests (`steps_in_flight.py`).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from ingot.errors import CapacityError, IngotError, RankError, RequestError
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.drafts.drafting import Drafting
from ingot.runtime.outlet import Outlet, Readers
from ingot.runtime.reports import Stats, StepReport, Work
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.run_step import Outcome, run_step
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.sequences import Sequences
from ingot.runtime.step_batch import (
    ScheduledStep,
    assemble,
    catch_up,
    failed_requests,
    follow,
    keep_results,
    wrong_drafts,
)
from ingot.runtime.steps_in_flight import steps_in_flight
from ingot.step_io import NOT_DRAWN, Ahead, Session, StepResult, SubmittingSession

_LOG = logging.getLogger("ingot.runtime")
_STEP_LOG_LENGTH = 100_000  # the most recent steps
_LONG_STEP = 0.012  # seconds: of longer steps the host takes less than 3 %, and they go singly
_CROSSING_SECONDS = 0.05  # no step follows when so much has gone by: readers get tokens, and who waits may find room
_DRAFTLESS_SECONDS = 0.002  # the same where drafts are made for every step that begins such a call


class StepLoop:
    """`session` belongs to the loop: `close` closes it.

    stop     int32 [1]: whatever thread sets it to 1, no step follows the one that runs without a look at what else came
    drafting of the session's steps, where it takes drafts and works at one step at a time
    on_step  is told of every step; must be quick
    work     what has been done so far; most_steps: that may follow each other in the next call
    """

    def __init__(
        self, session: Session, scheduler: Scheduler, blocks: BlockManager, drafting: Drafting | None = None
    ) -> None:
        self._session, self._scheduler, self._blocks, self._drafting = session, scheduler, blocks, drafting
        self._crossing = _CROSSING_SECONDS if drafting is None else _DRAFTLESS_SECONDS
        self._sequences = Sequences(session, scheduler.most_running)
        self._device = session if isinstance(session, SubmittingSession) else None
        self._flight = steps_in_flight(session)
        self._submitted: ScheduledStep | None = None  # what the session begins after the step that it is asked for
        self._steady_until = 0.0  # the next step is as the last one, if nobody comes or goes; time.perf_counter()
        self._result_at = 0.0  # when the last step ended, time.perf_counter()
        self.most_steps = 1
        self._closed: IngotError | None = None
        self._death: IngotError | None = None
        self._arrivals, self._readers = 0, Readers()
        self._doubtful: set[Request] = set()  # begin again after a step that failed, each alone
        self._last: ScheduledStep | None = None
        self._steps: deque[tuple[int, int]] = deque(maxlen=_STEP_LOG_LENGTH)
        self.stop = np.zeros(1, dtype=np.int32)
        self.on_step: Callable[[StepReport], None] | None = None
        self.work = Work()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._scheduler.has_work or self._submitted is not None or bool(self._flight)

    def require_fits(self, requests: Iterable[Request]) -> None:
        """Raise CapacityError if not even an empty cache holds one of the requests. From any thread."""
        blocks = self._blocks
        for request in requests:
            for needed, pool in zip(blocks.needed(request.max_cached_tokens), blocks.pools, strict=True):
                if needed > pool.num_blocks:
                    raise CapacityError(
                        "the KV cache is too small for this request",
                        expected=f"at most {pool.num_blocks} blocks of {blocks.tokens_per_block} tokens",
                        got=f"{request.max_cached_tokens} tokens, {needed} blocks",
                        hint="pass a larger kv_cache_memory or a smaller max_new_tokens",
                    )

    def add(self, requests: Iterable[Request], outlet: Outlet | None = None) -> None:
        """Queue requests that fit; after `close` they fail. outlet: where their tokens and ends are told."""
        requests = list(requests)
        self._steady_until = 0.0
        for request in requests:
            request.arrival = self._arrivals
            self._arrivals += 1
            self._readers.add(request, outlet)
            self._scheduler.add(request)
        if self._closed is not None:
            self.abort(requests, self._closed)
        if self._death is not None:
            self.die(self._death)

    def abort(self, requests: Iterable[Request], error: IngotError | None = None) -> None:
        """End requests; their blocks are free when this returns. Finished ones stay as they are.

        error  why, for those who wait for them and have not asked for this
        """
        for request in requests:
            self._end(request, error)
        self._readers.put()

    def step(self) -> bool:
        """Run a step, or several short ones; False if there was nothing to do."""
        if not self.has_work:
            return False
        start = time.perf_counter()
        step, ahead = (self._submitted, None) if self._submitted is not None else self._next_step()
        begin = self._result_at if self._submitted is not None else time.perf_counter()
        kinds, idle = step.kinds, 0 if self._flight is None else self._flight.idle_stages
        outcomes = self._run(step, ahead)
        self._result_at = time.perf_counter()
        taken = self._result_at - begin
        drafts = (0, 0) if self._drafting is None else self._drafting.learn(outcomes, taken)
        for part, outcome in outcomes:
            self._finish_step(part, outcome)
        self._readers.put()
        after = time.perf_counter() - self._result_at if self._submitted is None else 0.0  # the next step computes
        report = _report(outcomes, (begin - start, taken, after), kinds, drafts, idle)
        self.work = self.work.after(report, overlapped=0 if self._flight is None else self._flight.overlapped)
        self._account(report)
        if self._scheduler.tpot_budget is not None and len(outcomes) == 1:
            seconds = report.schedule_seconds + report.session_seconds + report.finish_seconds
            self._scheduler.tpot_budget.times.observe(sum(kinds), 1e3 * seconds)
        return True

    def drain(self) -> None:
        """Run until every request has ended."""
        while self.step():
            pass

    def settle(self) -> None:
        """Run the steps that pipeline stages have begun, and begin no others meanwhile. Raises RankError."""
        if self._flight is not None:
            with self._flight.resting():
                while self._flight and self._death is None:
                    self.step()

    def close(self, error: IngotError) -> None:
        """Fail every request that has not ended, release the session. Closing twice is fine."""
        if self._closed is not None:
            return
        self._closed, self._submitted = error, None
        self.abort([*self._scheduler.running, *self._scheduler.waiting], error)
        if self._drafting is not None:
            self._drafting.close()
        self._session.close()

    def die(self, error: IngotError) -> None:
        """Tell every reader that no step will follow, whatever state the rest is in."""
        self._death = error
        self._readers.put()
        for request in self._readers.waiting():
            if not request.finished:
                request.error, request.finish_reason = error, FinishReason.ABORT
        self._readers.tell(self._readers.waiting())
        self._readers.put()

    def stats(self) -> Stats:
        """Where things stand now."""
        return self._scheduler.stats()

    def step_log(self) -> list[list[int]]:
        """[prefill tokens, decode rows] of each step, the most recent 100,000."""
        return [list(counts) for counts in self._steps]

    def _account(self, report: StepReport) -> None:
        self._steps.extend([(report.prefill_tokens, report.decode_rows)] * report.steps)
        if self.on_step is not None:
            self.on_step(report)
        if not report.prefill_tokens:
            most = min(self._session.most_steps, 2 * report.steps)
            self.most_steps = _fitting(report.session_seconds, most, self._crossing)

    def _next_step(self) -> tuple[ScheduledStep, Ahead | None]:
        """The next step to run; stages that would idle begin further ones."""
        flight = self._flight
        if flight is None or not flight.fill(self._scheduler, self._assemble, alone=bool(self._doubtful)):
            return self._schedule()
        return flight.pop(), None

    def _schedule(self) -> tuple[ScheduledStep, Ahead | None]:
        """The next step, and how many like it may follow in the same call."""
        chunks = self._scheduler.schedule()
        assert chunks, "the oldest request can always advance"
        chunks = _alone(chunks, self._doubtful)
        self._steady_until = time.perf_counter() + _CROSSING_SECONDS if self._scheduler.waiting else math.inf
        has_drafts = self._drafting is not None and self._drafting.extend(chunks)
        most = 1 if has_drafts else self._scheduler.repeatable(chunks, self.most_steps)
        step = self._last = self._assemble(chunks, self._last)
        if most == 1 or step.batch.want_logits:
            return step, None
        return step, Ahead(most_steps=most, seconds=self._crossing, stop=self.stop)

    def _assemble(self, chunks: Mapping[Request, int], before: ScheduledStep | None = None) -> ScheduledStep:
        self._sequences.start(chunks)
        return assemble(chunks, before)

    def _run(self, step: ScheduledStep, ahead: Ahead | None = None) -> list[Outcome]:
        """The step's result; if it fails, each request alone, so that the one at fault fails alone. If several steps
        fail, one is tried first.

        Computing a chunk again writes the same keys and values to the same slots, and sequences begin again with the
        tokens that their requests have. States that a step has moved on cannot be moved back: requests with states
        begin again at their last snapshots.
        """
        try:
            if self._device is None or step.processed:
                outcomes = run_step(self._session, step, ahead)
            else:
                if step is not self._submitted:
                    self._device.submit(step.batch)
                self._submitted = self._submit_next(self._device, step)
                outcomes = [(step, self._device.wait())]
            self._doubtful.difference_update(step.chunks)
            return outcomes
        except BaseException as error:
            self._drop(error)
            self._sequences.end(step.chunks)
            if self._blocks.keeps_states:
                return self._start_over(step, error)
            if isinstance(error, RankError) or not isinstance(error, Exception):
                raise  # nothing can be computed any more, alone or again
            if ahead is not None:
                _LOG.warning("a call of several steps failed, the first step is repeated alone: %r", error)
                return self._run(self._assemble(step.chunks))
            if len(step.chunks) == 1:
                return [(step, _in_words(error))]
            _LOG.warning("a step of %d requests failed, it is repeated for each alone: %r", len(step.chunks), error)
        outcomes = []
        for request, count in step.chunks.items():
            if not request.finished:
                outcomes += self._run(self._assemble({request: count}))
        return outcomes

    def _submit_next(self, device: SubmittingSession, step: ScheduledStep) -> ScheduledStep | None:
        """The step after `step`, whose results are not there yet, if the host has nothing to decide before it."""
        going = self._scheduler.following(step.chunks) if self._result_at < self._steady_until else []
        if not going:
            return None
        following = self._last = follow(step, going)
        device.submit(following.batch)
        return following

    def _drop(self, error: BaseException) -> None:
        """Forget what is under way beside the step that has failed."""
        if self._device is not None:
            self._device.drop()
        if self._flight is not None and not isinstance(error, RankError):
            self._flight.drop(self._sequences, self._scheduler if self._blocks.keeps_states else None)
        self._submitted, self._steady_until = None, 0.0

    def _start_over(self, step: ScheduledStep, error: BaseException) -> list[Outcome]:
        """The requests of a step that failed begin again. One that fails by itself after that ends."""
        if isinstance(error, Exception) and self._doubtful.issuperset(step.chunks):
            return [(step, _in_words(error))]
        self._scheduler.preempt(step.chunks)
        if not isinstance(error, Exception):
            raise error
        _LOG.warning(
            "a step of %d requests failed, they begin again at the last snapshots of their states: %r",
            len(step.chunks),
            error,
        )
        self._doubtful.update(step.chunks)
        return []

    def _finish_step(self, step: ScheduledStep, outcome: StepResult | IngotError) -> None:
        """Move every request forward."""
        if isinstance(outcome, IngotError):
            self._fail(step.chunks, outcome)
            return
        catch_up(step, outcome)
        for request, error in failed_requests(step, outcome):
            self._fail([request], error)
        keep_results(step, outcome)
        if step.decodes and not outcome.ends.any():
            return self._move_on(step, outcome)
        size, wrong = self._blocks.tokens_per_block, wrong_drafts(step, outcome)
        for request, count in step.chunks.items():
            if request.finish_reason is None:
                request.num_computed = computed = request.num_computed + count - wrong.get(request, 0)
                request.num_drafted = 0
                if computed >= (request.blocks.sealed + 1) * size:
                    self._blocks.advance(request.blocks, request.tokens, computed)
        moved: dict[Request, None] = {}
        ids, log_probs = outcome.ids[-1].tolist(), outcome.log_probs[-1].tolist()
        for request, token, log_prob, ending in zip(step.sampled, ids, log_probs, outcome.ends.tolist(), strict=False):
            if request.finish_reason is None and token != NOT_DRAWN:
                request.append(token, log_prob, ending)
                moved[request] = None
                if ending:
                    self._remove(request)
        self._readers.tell(moved)

    def _move_on(self, step: ScheduledStep, outcome: StepResult) -> None:
        """The same for the last of several decode steps, after which nobody ends: the loop of most steps, kept lean."""
        size, several, moved = self._blocks.tokens_per_block, len(outcome.ids) > 1, []
        ids, log_probs = outcome.ids[-1].tolist(), outcome.log_probs[-1].tolist()
        for request, token, log_prob in zip(step.sampled, ids, log_probs, strict=False):
            if request.finish_reason is None:
                request.num_computed = computed = request.num_tokens
                if (several or not computed % size) and computed >= (request.blocks.sealed + 1) * size:
                    self._blocks.advance(request.blocks, request.tokens, computed)
                request.tokens[computed] = token
                request.num_tokens = computed + 1
                request.log_probs.append(log_prob)
                moved.append(request)
        self._readers.tell_going(moved)

    def _fail(self, requests: Iterable[Request], error: IngotError) -> None:
        for request in requests:
            if not request.finished:
                self._blocks.forget(request.blocks)
                self._end(request, error)

    def _end(self, request: Request, error: IngotError | None) -> None:
        if not request.finished and request.arrival >= 0:
            request.error, request.finish_reason = error, FinishReason.ABORT
            self._remove(request)
            self._readers.tell([request])

    def _remove(self, request: Request) -> None:
        if self._scheduler.waiting:  # one of these may find room now
            self._steady_until = 0.0
        self._doubtful.discard(request)
        if self._drafting is not None:
            self._drafting.forget(request)
        self._scheduler.remove(request)
        self._sequences.end([request])


def _report(
    outcomes: Sequence[Outcome],
    seconds: tuple[float, float, float],
    kinds: tuple[int, int],
    drafts: tuple[int, int],
    idle_stages: int,
) -> StepReport:
    """seconds, kinds, drafts: pairs and a triple in the order of the report's fields, of all steps together."""
    steps = max([1 if isinstance(outcome, IngotError) else len(outcome.ids) for _, outcome in outcomes], default=1)
    return StepReport(
        steps=steps,
        prefill_tokens=kinds[0],
        decode_rows=kinds[1],
        schedule_seconds=max(seconds[0], 0.0) / steps,
        session_seconds=seconds[1] / steps,
        finish_seconds=seconds[2] / steps,
        idle_stages=idle_stages,
        drafted=drafts[0],
        right_drafts=drafts[1],
    )


def _fitting(seconds: float, most: int, crossing: float) -> int:
    """How many steps may follow each other in a call. seconds: of one; most: that the session computes in a call."""
    return 1 if seconds > _LONG_STEP else min(1 + int(crossing / max(seconds, 1e-6)), most)


def _alone(chunks: dict[Request, int], doubtful: Container[Request]) -> dict[Request, int]:
    """A doubtful request is computed by itself: the others' turn comes after it."""
    first = next((request for request in chunks if request in doubtful), None)
    return chunks if first is None else {first: chunks[first]}


def _in_words(error: Exception) -> IngotError:
    return error if isinstance(error, IngotError) else RequestError("a step failed", got=repr(error))
