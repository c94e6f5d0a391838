"""How long the steps of a replica take, for its session in virtual time: one number for each pipeline stage."""

import dataclasses
from collections.abc import Callable, Sequence

from ingot.planner.cost import Int64, StepCost
from ingot.planner.device import Device, Float64, decode_seconds, load_seconds, step_load


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """How long steps take.

    step     (tokens before, tokens now) of each sequence, rows of logits → seconds in each pipeline stage
    call     seconds of each call of the session, beside those of its steps
    decode   the tokens before of each sequence of some batches, steps → seconds of each of this many decode steps in
             turn of each batch: [stages, batches, steps]; None: `step` is asked for each
    """

    step: Callable[[Int64, Int64, int], Sequence[float]]
    stages: int = 1
    call: float = 0.0
    decode: Callable[[Sequence[Sequence[int]], int], Float64] | None = None


def stages_clock(stages: Sequence[StepCost], device: Device, ranks: int, cached: int = 0) -> Clock:
    """ranks: of each stage; cached: tokens that every sequence has in the cache before its first step."""
    distinct = list(dict.fromkeys(stages))  # most stages cost the same
    places = [distinct.index(cost) for cost in stages]
    windows = tuple({cache.window for cost in distinct for cache in cost.caches})

    def step(past: Int64, new: Int64, rows: int) -> list[float]:
        load = step_load(past + cached, new, rows, windows)
        found = [load_seconds(cost, device, ranks, load).total for cost in distinct]
        return [found[place] for place in places]

    def decode(batches: Sequence[Sequence[int]], steps: int) -> Float64:
        shifted = [[past + cached for past in each] for each in batches] if cached else batches
        return decode_seconds(distinct, device, ranks, shifted, steps)[places]

    return Clock(step=step, stages=len(stages), call=device.call_seconds, decode=decode)
