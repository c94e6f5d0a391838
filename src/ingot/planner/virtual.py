"""A session that computes nothing and says how long each step would have taken, and the loop that it works for.

Pipeline stages compute steps one after another, step by step in the real loop. Where all requests decode, nothing is
decided between these steps: `VirtualLoop.skip` moves requests, blocks and time past many of them at once.

    stage 0   A0  B0  A1  B1  A2 ...      A, B: requests of two steps; a step begins where its requests' step before has
    stage 1       A0  B0  A1  B1 ...      ended in the last stage, and the step before it in the stage
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from ingot.planner.clock import Clock
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_batch import ScheduledStep
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, Ending, Float32, Int32, SequenceRules, StepBatch, StepResult

_ROUNDS = 128  # decode steps of each request in a call, at most
_ZEROS, _NOTHINGS = np.zeros(_ROUNDS, np.int32), [0.0] * _ROUNDS


class VirtualSession:
    """Draws token 0 for everybody, and lets `clock` move the time. now: in seconds; until: no decode step begins by
    itself at this time or later. Pipeline stages work at different steps at once, as those of a real session."""

    def __init__(self, clock: Clock, num_blocks: tuple[int, ...]) -> None:
        self.now, self.until = 0.0, float("inf")
        self.busy, self.steps = 0.0, 0
        self.num_blocks, self.stages = num_blocks, clock.stages
        self.most_steps, self.takes_drafts = 1 if clock.decode is None else _ROUNDS, False
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
        taken = self._clock.step(batch.past_lengths.astype(np.int64), new, len(batch.logit_rows))
        self._ends.append(through(taken, self.now, self._free))
        self.busy, self.steps = self.busy + max(taken), self.steps + 1

    def settle(self) -> None:
        """Forget announced steps."""
        self._ends.clear()

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One step, or several: up to one after which a sequence has ended, or the time has come to `until`."""
        slots = batch.slots[np.searchsorted(batch.query_starts, batch.logit_rows[batch.draws], side="right") - 1]
        drawing, count = slots.tolist(), 1
        self.now += self._clock.call
        if ahead is not None and self._clock.decode is not None:
            most = min(ahead.most_steps, *(self._left[slot] for slot in drawing))
            taken = self._clock.decode([batch.past_lengths.tolist()], most)[:, 0]
            ends = self.now + np.cumsum(taken.sum(axis=0))
            count = min(most, 1 + int(np.searchsorted(ends, self.until)))
            self.busy, self.steps = self.busy + float(taken.max(axis=0)[:count].sum()), self.steps + count
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

    def rounds(self) -> int:
        """Decode steps of each request that may begin before `until`, if all take as long as the last one announced."""
        through = self._ends[-1] - self.now
        return 1 + int(min(_ROUNDS - 1, max(self.until - self.now, 0.0) / max(through, 1e-9)))

    def following(self, batches: Sequence[tuple[list[int], list[int]]], most: int) -> "Following | None":
        """The decode steps that follow those under way, if each of these is announced again as soon as it has run: at
        most this many, none of which is announced at `until` or later, and none after one that ends a sequence.

        batches  slots and known tokens of each step under way
        """
        assert self._clock.decode is not None, "the caller looked"
        width = len(batches)
        for place, (slots, _) in enumerate(batches):
            most = min(most, place + (min([self._left[slot] for slot in slots]) - 1) * width)
        if most <= 0:
            return None
        taken = self._clock.decode([known for _, known in batches], -(-most // width))
        steps = taken.transpose(2, 1, 0).reshape(-1, self.stages)[:most]  # [steps, stages], in the order of their turns
        ends, free, until = [*self._ends], self._free.copy(), self.until
        begun = 0
        for seconds in steps.tolist():
            at = ends[begun]  # when the step before of these requests has run: their next one begins
            if at >= until:
                break
            ends.append(through(seconds, at, free))
            begun += 1
        if not begun:
            return None
        busy = float(steps[:begun].max(axis=1).sum())
        return Following(begins=ends[:begun], ends=ends[begun:], free=free, busy=busy)

    def skip(self, following: "Following", batches: Sequence[tuple[list[int], list[int]]]) -> None:
        """These steps have been announced, and as many have run."""
        count = len(following.begins)
        self.now, self._free, self._ends = following.begins[-1], following.free, deque(following.ends)
        self.busy, self.steps = self.busy + following.busy, self.steps + count
        for (slots, _), turns in zip(batches, turns_of(count, len(batches)), strict=True):
            for slot in slots:
                self._left[slot] -= turns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """Decode steps in turn. begins: when each was announced, which is when the one before of its requests had run;
    ends: of those under way after them; free: see VirtualSession; busy: seconds of the slowest stage of each, in all"""

    begins: list[float]
    ends: list[float]
    free: list[float]
    busy: float


def through(seconds: Sequence[float], at: float, free: list[float]) -> float:
    """When a step that is announced at `at` ends in the last stage. free: of each stage, when it has ended what it was
    given; is moved."""
    for stage, taken in enumerate(seconds):
        idle = free[stage]
        free[stage] = at = (idle if idle > at else at) + taken
    return at


def turns_of(count: int, width: int) -> list[int]:
    """How many of so many turns each of `width` has that take turns."""
    return [(count - place + width - 1) // width for place in range(width)]


class VirtualLoop(StepLoop):
    """The loop of a virtual session."""

    def __init__(self, session: VirtualSession, scheduler: Scheduler, blocks: BlockManager) -> None:
        super().__init__(session, scheduler, blocks)
        self._virtual = session

    def skip(self) -> dict[Request, float]:
        """Move past decode steps of pipeline stages: all that `step` would run before `until` without a decision, up to
        the last one. Gives the requests that had their first token meanwhile, and when.

        Nothing is decided as long as the requests of each step under way decode again together: nobody waits who may
        start, nobody ends, and the steps divide the requests as evenly as those that come after them would.
        """
        flight = self._flight
        if flight is None or self._virtual.most_steps == 1:
            return {}
        if not flight.fill(self._scheduler, self._assemble, alone=False) or not self._goes_round(flight.steps):
            return {}
        batches = [
            (
                [slot for request in step.chunks if (slot := request.slot) is not None],
                [r.num_tokens for r in step.chunks],
            )
            for step in flight.steps
        ]
        most = self._virtual.rounds() * len(batches)
        while (following := self._virtual.following(batches, most)) is not None:
            if self._reserve(flight.steps, len(following.begins)):
                break
            most = len(following.begins) // 2
        if following is None:
            return {}
        self._virtual.skip(following, batches)
        return self._move(flight.steps, following.begins)

    def _goes_round(self, steps: Sequence[ScheduledStep]) -> bool:
        """Whether the steps after those under way are the same ones again, as long as nobody ends."""
        scheduler, stages = self._scheduler, self._virtual.stages
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        if waiting and running < scheduler.most_running:
            return False
        if sum([len(step.chunks) for step in steps]) < running:
            return False
        for step in steps:
            own = len(step.chunks)  # and so many does `StepsInFlight.share` allow when they are the only idle ones:
            if own > min(-(-(running + waiting) // stages), -(-(own + waiting) // (stages - len(steps) + 1))):
                return False
        counts = [item for step in steps for item in step.chunks.items()]
        return all([request.num_computed + count == request.num_tokens for request, count in counts])

    def _reserve(self, steps: Sequence[ScheduledStep], count: int) -> bool:
        """Blocks for what requests know when this many steps have run."""
        wanted = [
            (request.blocks, request.num_tokens + turns)
            for step, turns in zip(steps, turns_of(count, len(steps)), strict=True)
            for request in step.chunks
            if turns
        ]
        return self._blocks.reserve(wanted)

    def _move(self, steps: deque[ScheduledStep], begins: Sequence[float]) -> dict[Request, float]:
        """Give requests the tokens of the steps that have run, and put those under way in their order."""
        first, size = dict[Request, float](), self._blocks.tokens_per_block
        width = len(steps)
        for place, turns in enumerate(turns_of(len(begins), width)):
            step = steps[place]
            if turns == 0:
                continue
            for request, count in step.chunks.items():
                if not request.num_generated:
                    first[request] = begins[place]
                request.num_computed += count - 1
                request.num_under_way = 1
                request.catch_up(_ZEROS[:turns], _NOTHINGS[:turns])
                if request.num_computed >= (request.blocks.sealed + 1) * size:
                    self._blocks.advance(request.blocks, request.tokens, request.num_computed)
            if sum(step.chunks.values()) > len(step.chunks):
                steps[place] = dataclasses.replace(step, chunks=dict.fromkeys(step.chunks, 1))
        steps.rotate(-len(begins))
        return first
