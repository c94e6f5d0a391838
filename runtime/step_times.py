"""How long a step of n tokens takes on this machine, so that a TPOT target becomes a budget of tokens per step.

ms │                      ●      measured when the runner is made, at 1, 2, 4, ... tokens until it takes too long;
   │             ●    ●          every step that runs corrects the two points beside it
───┼───────●────┊─────────── tpot_target
   │ ●  ●       ┊
   └────────────┴───────────▶ tokens
              budget
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from ingot.errors import UsageError
from ingot.plan import Limits
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.request import Request
from ingot.runtime.sequences import Sequences
from ingot.runtime.step_batch import assemble
from ingot.step_io import Session

_LEARNING = 0.2  # how far a single step moves the table towards what it took
_OUTLIER = 2.0  # a step counts as at most this many times longer or shorter than predicted
_REPEATS = 3


class StepTimes:
    """Points (tokens, milliseconds), ascending; a longer step never counts as a faster one."""

    def __init__(self, tokens: Sequence[int], ms: Sequence[float]) -> None:
        assert len(tokens) == len(ms) > 0, "a table of step times has points"
        self._tokens = np.array(tokens, dtype=np.float64)
        self._measured = np.array(ms, dtype=np.float64)

    def predict(self, tokens: int) -> float:
        """Milliseconds of a step of `tokens` tokens."""
        return float(np.interp(tokens, self._tokens, self._monotone()))

    def observe(self, tokens: int, ms: float) -> None:
        """A step of `tokens` tokens took `ms`."""
        ratio = min(max(ms / self.predict(tokens), 1 / _OUTLIER), _OUTLIER)
        above = int(np.searchsorted(self._tokens, tokens))
        beside = slice(
            max(above - 1, 0) if above == len(self._tokens) or self._tokens[above] > tokens else above, above + 1
        )
        self._measured[beside] *= ratio**_LEARNING

    def budget(self, ms: float) -> int:
        """The most tokens whose step is expected within `ms`; 0 if not even one."""
        times = self._monotone()
        fitting = int(np.searchsorted(times, ms, side="right"))  # points within
        if fitting == len(times):
            return int(self._tokens[-1])
        if not fitting:
            return 0
        low, high = self._tokens[fitting - 1], self._tokens[fitting]
        share = (ms - times[fitting - 1]) / (times[fitting] - times[fitting - 1])
        return int(low + share * (high - low))

    def _monotone(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.maximum.accumulate(self._measured)


def measure_step_times(session: Session, blocks: BlockManager, limits: Limits, tpot_target: float) -> StepTimes:
    """Run steps of 1, 2, 4, ... tokens of prompts until one takes longer than `tpot_target` ms.

    Longer steps are expected to take proportionally longer. Raises UsageError if one token already takes too long.
    """
    sizes = [2**n for n in range((limits.max_num_tokens - 1).bit_length())] + [limits.max_num_tokens]
    times: list[float] = []
    for size in sizes:
        if times and times[-1] > tpot_target:
            times.append(times[-1] * size / sizes[len(times) - 1])
        else:
            times.append(_time_step(session, blocks, limits, size))
    if times[0] > tpot_target:
        raise UsageError(
            "tpot_target is less than a step with a single token takes here",
            expected=f"more than {times[0]:.3g} ms",
            got=f"{tpot_target:g} ms",
            hint="raise it, or use a smaller or more compressed engine",
        )
    return StepTimes(sizes, times)


def _time_step(session: Session, blocks: BlockManager, limits: Limits, size: int) -> float:
    """Milliseconds of a step of `size` tokens, spread over as many prompts as they need: the best of a few."""
    longest = min(
        limits.max_input_len,
        min(pool.num_blocks for pool in blocks.pools) * blocks.tokens_per_block // -(-size // limits.max_input_len),
    )
    chunks: dict[Request, int] = {}
    left = size
    while left and len(chunks) < min(limits.max_batch_size, limits.max_logit_rows):
        count = min(left, longest)
        request = Request(np.zeros(count, dtype=np.int32), max_new_tokens=1)
        if not blocks.reserve([(request.blocks, count)]):
            break
        chunks[request] = count
        left -= count
    sequences, best = Sequences(session, limits.max_batch_size), math.inf
    for _ in range(_REPEATS):
        sequences.start(chunks)
        step = assemble(chunks)
        start = time.perf_counter()
        session.run(step.batch)
        best = min(best, time.perf_counter() - start)
        sequences.end(chunks)
    for request in chunks:
        blocks.release(request.blocks)
    return 1e3 * best * size / (size - left)
