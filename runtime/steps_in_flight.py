"""Steps that pipeline stages compute at once: no request is in two of them.

stage 0   A0  B0  A1  B1  A2          A, B: requests of two steps under way, which take turns
stage 1       A0  B0  A1  B1          a request's next token follows the one that the last stage draws
"""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.sequences import Sequences
from ingot.runtime.step_batch import ScheduledStep
from ingot.step_io import KnownTokens, PipelineSession, Session


class StepsInFlight:
    """steps: in the order in which they were announced.

    overlapped  how many have been announced while another one was under way
    """

    def __init__(self, session: PipelineSession) -> None:
        self._session, self.steps = session, deque[ScheduledStep]()
        self.overlapped = 0
        self._rests = False

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def stages(self) -> int:
        """How many there may be."""
        return self._session.stages

    @property
    def idle_stages(self) -> int:
        """Those without a step while the step that has been popped runs, or one that was not announced."""
        return self.stages - 1 - len(self.steps)

    @property
    def requests(self) -> set[Request]:
        """Those of all steps."""
        return {request for step in self.steps for request in step.chunks}

    def share(self, known: int) -> int:
        """Requests that the next step may have, of all that are known: every stage is to have as many."""
        idle, free = known - sum(len(step.chunks) for step in self.steps), self.stages - len(self.steps)
        return min(-(-known // self.stages), -(-max(idle, 0) // free))

    def fill(
        self, scheduler: Scheduler, assemble: Callable[[Mapping[Request, int]], ScheduledStep], *, alone: bool
    ) -> bool:
        """Begin steps of requests that are in none, while stages would idle. alone: begin none. False: no step is under
        way, and the next one is not to be announced."""
        known, alone = len(scheduler.running) + len(scheduler.waiting), alone or self._rests
        if not self.steps and (alone or known == 1):
            return False
        while len(self.steps) < self.stages and not alone:
            share = self.share(known)
            chunks = scheduler.schedule(self.requests, share) if share else {}
            if not chunks:
                break
            self.announce(assemble(chunks))
        assert self.steps, "the oldest request can always advance"
        return True

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Meanwhile no step begins: those that are under way end."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def drop(self, sequences: Sequences, scheduler: Scheduler | None) -> None:
        """End what is under way without results: its requests compute it again. scheduler: of a model with states,
        which cannot be moved back; then they begin again."""
        for step in self.settle():
            sequences.end(step.chunks)
            if scheduler is not None:
                scheduler.preempt([request for request in step.chunks if not request.finished])

    def announce(self, step: ScheduledStep) -> None:
        """Have the first stage begin it."""
        self._session.announce(step.batch)
        self.overlapped += bool(self.steps)
        self.steps.append(step)

    def pop(self) -> ScheduledStep:
        """The oldest, which must run now; without the draws of requests that have ended since."""
        return without_ended(self.steps.popleft())

    def settle(self) -> list[ScheduledStep]:
        """End all of them without results, also one that has been popped and did not run. Gives those that were not
        popped."""
        self._session.settle()
        steps = list(self.steps)
        self.steps.clear()
        return steps


def steps_in_flight(session: Session) -> StepsInFlight | None:
    """None for a session without stages."""
    several = session if isinstance(session, PipelineSession) else None
    return None if several is None or several.stages == 1 else StepsInFlight(several)


def without_ended(step: ScheduledStep) -> ScheduledStep:
    """A step that draws nothing, and keeps nothing, of requests that have ended since it was made."""
    if not any(request.finished for request in step.chunks):
        return step
    place = len(step.sampled) - len(step.processed)
    draws = [
        (request, row)
        for request, row in zip(step.sampled, step.batch.draws.tolist(), strict=False)
        if not request.finished
    ]
    processed = [
        (request, row)
        for request, row in zip(step.sampled[place:], step.processed, strict=True)
        if not request.finished
    ]
    kept = [i for i, (request, _, _) in enumerate(step.known) if not request.finished]
    known = step.batch.known
    if known is not None:
        known = KnownTokens(row=known.row[kept], token=known.token[kept], top=known.top[kept]) if kept else None
    batch = dataclasses.replace(step.batch, draws=np.array([row for _, row in draws], dtype=np.int32), known=known)
    return dataclasses.replace(
        step,
        sampled=(*(request for request, _ in draws), *(request for request, _ in processed)),
        processed=tuple(row for _, row in processed),
        known=tuple(step.known[i] for i in kept),
        batch=batch,
    )
