"""The real scheduler, block manager and step loop in virtual time: a session that computes nothing and says how long
each step would have taken."""

import dataclasses
import heapq
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ingot.configs.runtime import Policy
from ingot.plan import Limits
from ingot.planner.cost import Int64
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.outlet import Outlet
from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, Ending, Float32, Int32, SequenceRules, StepBatch, StepResult

Float64 = npt.NDArray[np.float64]
Clock = Callable[[Int64, Int64, int], float]
"""(tokens before, tokens now) of each sequence, rows of logits → seconds of the step"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What requests saw, in seconds, in their order. ttft: from arrival; tpot: NaN of those with one token.

    seconds  until the last one ended; busy: of these, in steps
    """

    ttft: Float64
    tpot: Float64
    seconds: float
    busy: float
    steps: int
    tokens: int
    preemptions: int


class VirtualSession:
    """Draws token 0 for everybody, and lets `clock` move the time. now: in seconds."""

    most_steps = 1

    def __init__(self, clock: Clock, num_blocks: tuple[int, ...]) -> None:
        self.now = 0.0
        self.steps: list[float] = []
        self.num_blocks = num_blocks
        self._clock, self._left = clock, dict[int, int]()

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Remember how many tokens a sequence may still get."""
        self._left[slot] = rules.max_tokens - (len(tokens) - num_prompt)

    def end(self, slot: int) -> None:
        """Forget it."""
        self._left.pop(slot, None)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One step."""
        new = np.diff(batch.query_starts).astype(np.int64)
        seconds = self._clock(batch.past_lengths.astype(np.int64), new, len(batch.logit_rows))
        self.now += seconds
        self.steps.append(seconds)
        drawing = batch.slots[np.searchsorted(batch.query_starts, batch.logit_rows[batch.draws], side="right") - 1]
        ends = []
        for slot in drawing.tolist():
            self._left[slot] -= 1
            ends.append(Ending.NONE if self._left[slot] else Ending.LENGTH)
        zeros = np.zeros((1, len(ends)), np.int32)
        return StepResult(ids=zeros, log_probs=zeros.astype(np.float32), ends=np.array(ends, np.int32))

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Never called: it is for requests with logits processors, and none here has any."""
        raise AssertionError("a simulated request has no logits processors")

    def close(self) -> None:
        """Nothing is held."""


def simulate(
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float],
    clock: Clock,
    *,
    limits: Limits,
    num_blocks: Sequence[int],
    tokens_per_block: int,
    windows: Sequence[int] = (0,),
    prefill_chunk: int | None = None,
) -> Served:
    """Requests of (prompt tokens, generated tokens) that arrive at these seconds, in order, at one replica.

    prefill_chunk: see `Scheduler`. Raises CapacityError for a request that can never run.
    """
    blocks = BlockManager(num_blocks, tokens_per_block, windows=windows, prefix_cache=False)
    session = VirtualSession(clock, tuple(num_blocks))
    scheduler = Scheduler(limits, blocks, Policy.MAX_UTILIZATION, prefill_chunk=prefill_chunk)
    loop, outlet = StepLoop(session, scheduler, blocks), Outlet()
    requests = [Request(np.zeros(given, np.int32), max_new_tokens=new) for given, new in lengths]
    loop.require_fits(requests)
    first, last = np.full(len(requests), np.nan), np.full(len(requests), np.nan)
    places = {request: index for index, request in enumerate(requests)}
    waiting = [(arrival, index) for index, arrival in enumerate(arrivals)]
    heapq.heapify(waiting)
    while waiting or loop.has_work:
        if not loop.has_work:
            session.now = max(session.now, waiting[0][0])
        come = []
        while waiting and waiting[0][0] <= session.now:
            come.append(requests[heapq.heappop(waiting)[1]])
        loop.add(come, outlet)
        loop.step()
        for request, count, ended in outlet.get(timeout=0):
            place = places[request]
            if ended and request.error is not None:
                raise request.error
            if count and np.isnan(first[place]):
                first[place] = session.now
            last[place] = session.now
    news = np.array([new for _, new in lengths])
    tpot = np.where(news > 1, (last - first) / np.maximum(news - 1, 1), np.nan)
    return Served(
        ttft=first - np.array(arrivals),
        tpot=tpot,
        seconds=session.now - min(arrivals),
        busy=sum(session.steps),
        steps=len(session.steps),
        tokens=int(news.sum()),
        preemptions=scheduler.preemptions,
    )
