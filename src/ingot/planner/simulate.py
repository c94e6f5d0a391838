"""The real scheduler, block manager and step loop in virtual time: a session that computes nothing and says how long
each step would have taken.

    arrivals ─▶ router: the less loaded of two replicas ─▶ Replica: Scheduler, BlockManager, StepLoop ─▶ VirtualSession
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ingot.configs.runtime import Policy
from ingot.plan import Limits
from ingot.planner.cost import Int64
from ingot.planner.device import Float64
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.outlet import Outlet
from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, Ending, Float32, Int32, SequenceRules, StepBatch, StepResult


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """How long steps take.

    step     (tokens before, tokens now) of each sequence, rows of logits → seconds in each pipeline stage
    decode   (tokens before) of each sequence, steps → seconds of each of these decode steps, one by one through
             all stages; None: `step` is asked for each
    """

    step: Callable[[Int64, Int64, int], Sequence[float]]
    stages: int = 1
    decode: Callable[[Int64, int], Float64] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What requests saw, in seconds, in their order. ttft: from arrival; tpot: NaN of those with one token.

    seconds  until the last one ended; busy: of these, in steps, of all replicas together
    """

    ttft: Float64
    tpot: Float64
    seconds: float
    busy: float
    steps: int
    tokens: int
    preemptions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """limits, num_blocks, tokens_per_block, windows: of the engine; prefill_chunk: see `Scheduler`."""

    limits: Limits
    num_blocks: tuple[int, ...]
    tokens_per_block: int
    windows: tuple[int, ...] = (0,)
    prefill_chunk: int | None = None


class VirtualSession:
    """Draws token 0 for everybody, and lets `clock` move the time. now: in seconds; until: no decode step begins by
    itself at this time or later. Pipeline stages work at different steps at once, as those of a real session."""

    def __init__(self, clock: Clock, num_blocks: tuple[int, ...]) -> None:
        self.now, self.until = 0.0, float("inf")
        self.busy, self.steps = 0.0, 0
        self.num_blocks, self.stages = num_blocks, clock.stages
        self.most_steps = 1 if clock.decode is None else 128
        self._clock, self._left = clock, dict[int, int]()
        self._free = [0.0] * clock.stages  # when each stage has ended what it was given
        self._ends = deque[float]()  # of announced steps

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Remember how many tokens a sequence may still get."""
        self._left[slot] = rules.max_tokens - (len(tokens) - num_prompt)

    def end(self, slot: int) -> None:
        """Forget it."""
        self._left.pop(slot, None)

    def announce(self, batch: StepBatch) -> None:
        """Each stage begins the step when it has nothing older, and the stage before has ended it."""
        new = np.diff(batch.query_starts).astype(np.int64)
        at, taken = self.now, self._clock.step(batch.past_lengths.astype(np.int64), new, len(batch.logit_rows))
        for stage, seconds in enumerate(taken):
            at = self._free[stage] = max(at, self._free[stage]) + seconds
        self._ends.append(at)
        self.busy, self.steps = self.busy + max(taken), self.steps + 1

    def settle(self) -> None:
        """Forget announced steps."""
        self._ends.clear()

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One step, or several: up to one after which a sequence has ended, or the time has come to `until`."""
        slots = batch.slots[np.searchsorted(batch.query_starts, batch.logit_rows[batch.draws], side="right") - 1]
        drawing, count = slots.tolist(), 1
        if ahead is not None and self._clock.decode is not None:
            most = min(ahead.most_steps, *(self._left[slot] for slot in drawing))
            ends = self.now + np.cumsum(self._clock.decode(batch.past_lengths.astype(np.int64), most))
            count = min(most, 1 + int(np.searchsorted(ends, self.until)))
            self.busy, self.steps = self.busy + float(ends[count - 1]) - self.now, self.steps + count
            self.now = float(ends[count - 1])
        else:
            if not self._ends:
                self.announce(batch)
            self.now = max(self.now, self._ends.popleft())
        ended = []
        for slot in drawing:
            self._left[slot] -= count
            ended.append(Ending.NONE if self._left[slot] else Ending.LENGTH)
        zeros = np.zeros((count, len(ended)), np.int32)
        return StepResult(ids=zeros, log_probs=zeros.astype(np.float32), ends=np.array(ended, np.int32))

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Never called: it is for requests with logits processors, and none here has any."""
        raise AssertionError("a simulated request has no logits processors")

    def close(self) -> None:
        """Nothing is held."""


class Replica:
    """One engine in virtual time.

    outstanding  requests that have come and not ended
    """

    def __init__(self, clock: Clock, options: ReplicaOptions) -> None:
        blocks = BlockManager(options.num_blocks, options.tokens_per_block, windows=options.windows, prefix_cache=False)
        self.session = VirtualSession(clock, options.num_blocks)
        self.scheduler = Scheduler(options.limits, blocks, Policy.MAX_UTILIZATION, prefill_chunk=options.prefill_chunk)
        self._loop, self._outlet = StepLoop(self.session, self.scheduler, blocks), Outlet()
        self._places: dict[Request, int] = {}

    @property
    def outstanding(self) -> int:
        return len(self._places)

    def add(self, place: int, lengths: tuple[int, int], arrival: float) -> None:
        """Raises CapacityError for a request that can never run. place: of the request, in the arrays of `advance`."""
        request = Request(np.zeros(lengths[0], np.int32), max_new_tokens=lengths[1])
        self._loop.require_fits([request])
        if not self._loop.has_work:
            self.session.now = max(self.session.now, arrival)
        self._places[request] = place
        self._loop.add([request], self._outlet)

    def advance(self, until: float, first: Float64, last: Float64) -> None:
        """Run steps that begin before this time. first, last: get when requests had their first and last tokens."""
        session = self.session
        while self._loop.has_work and session.now < until:
            session.until, self._loop.most_steps = until, session.most_steps
            self._loop.step()
            for request, count, ended in self._outlet.get(timeout=0):
                place = self._places[request]
                if ended:
                    if request.error is not None:
                        raise request.error
                    del self._places[request]
                if count and np.isnan(first[place]):
                    first[place] = session.now
                last[place] = session.now


def simulate(
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float],
    clock: Clock,
    options: ReplicaOptions,
    *,
    replicas: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Served:
    """Requests of (prompt tokens, generated tokens) that arrive at these seconds, in order. Each goes to the replica
    with fewer requests, of two that are drawn by chance. progress: is told how many have come.

    Raises CapacityError for a request that can never run.
    """
    servers = [Replica(clock, options) for _ in range(replicas)]
    first, last = np.full(len(lengths), np.nan), np.full(len(lengths), np.nan)
    random = np.random.default_rng(0)
    pairs = random.integers(0, replicas, (len(lengths), 2)) if replicas > 1 else np.zeros((len(lengths), 1), np.int64)
    for place, (arrival, pair) in enumerate(zip(arrivals, pairs.tolist(), strict=True)):
        drawn = [servers[number] for number in dict.fromkeys(pair)]
        for server in drawn:
            server.advance(arrival, first, last)
        min(drawn, key=lambda server: server.outstanding).add(place, lengths[place], arrival)
        progress(place)
    for server in servers:
        server.advance(float("inf"), first, last)
    news = np.array([new for _, new in lengths])
    tpot = np.where(news > 1, (last - first) / np.maximum(news - 1, 1), np.nan)
    return Served(
        ttft=first - np.array(arrivals),
        tpot=tpot,
        seconds=max(server.session.now for server in servers) - min(arrivals),
        busy=sum(server.session.busy for server in servers),
        steps=sum(server.session.steps for server in servers),
        tokens=int(news.sum()),
        preemptions=sum(server.scheduler.preemptions for server in servers),
    )
