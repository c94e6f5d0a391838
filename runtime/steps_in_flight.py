"""Steps that pipeline stages compute at once.

stage 0   A0  B0  A1  B1  A2          A, B: requests of two steps under way, which take turns
stage 1       A0  B0  A1  B1          a request's next token follows the one that the last stage draws

stage 0   P0  P1  P2  P3              P: chunks of one prompt. All stages compute steps in the same order, so a stage
stage 1       P0  P1  P2  P3          has the keys, values and states of a chunk before it begins the next one
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

_LEAST_CHUNK = 256  # tokens of a prompt in a step: fewer would make the kernels slower
_TURNS = 4  # steps in which a stage computes prompts at least, where they are long enough


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

    def share(self, scheduler: Scheduler) -> int:
        """Requests that the next step may have, of all that are in none: every stage is to have as many."""
        waiting, running = len(scheduler.waiting), scheduler.running
        idle, free = waiting + sum([not request.num_under_way for request in running]), self.stages - len(self.steps)
        return min(-(-(waiting + len(running)) // self.stages), -(-idle // free))

    def fill(
        self, scheduler: Scheduler, assemble: Callable[[Mapping[Request, int]], ScheduledStep], *, alone: bool
    ) -> bool:
        """Begin steps while stages would idle, of requests that are in none, and of further chunks of prompts. alone:
        begin none. False: no step is under way, and the next one is not to be announced."""
        alone = alone or self._rests
        if not self.steps and (alone or _pending(scheduler) == 1):  # nothing can begin before that token is computed
            return False
        while len(self.steps) < self.stages and not alone:
            left = _pending(scheduler)
            chunks = scheduler.schedule(self.share(scheduler), chunk_tokens(left, self.stages)) if left else {}
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
                scheduler.preempt(step.chunks)

    def announce(self, step: ScheduledStep) -> None:
        """Have the first stage begin it."""
        self._session.announce(step.batch)
        for request, count in step.chunks.items():
            request.num_under_way += count
        self.overlapped += bool(self.steps)
        self.steps.append(step)

    def pop(self) -> ScheduledStep:
        """The oldest, which must run now; without the draws of requests that have ended since."""
        step = self.steps.popleft()
        for request, count in step.chunks.items():
            request.num_under_way -= count
        return without_ended(step)

    def settle(self) -> list[ScheduledStep]:
        """End all of them without results, also one that has been popped and did not run. Gives those that were not
        popped."""
        self._session.settle()
        steps = list(self.steps)
        self.steps.clear()
        for step in steps:
            for request in step.chunks:
                request.num_under_way = 0
        return steps


def steps_in_flight(session: Session) -> StepsInFlight | None:
    """None for a session without stages."""
    several = session if isinstance(session, PipelineSession) else None
    return None if several is None or several.stages == 1 else StepsInFlight(several)


def chunk_tokens(left: int, stages: int) -> int:
    """How many of `left` tokens the next step of prompts may have. While the first and the last chunk of a prompt go
    through the stages, some of these idle: so each stage gets several chunks, the last of which are the shortest."""
    return max(-(-left // (_TURNS * stages)), _LEAST_CHUNK)


def _pending(scheduler: Scheduler) -> int:
    """Tokens that no step has begun, of all requests."""
    both = scheduler.running, scheduler.waiting
    return sum([r.num_tokens - r.num_computed - r.num_under_way for requests in both for r in requests])


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
