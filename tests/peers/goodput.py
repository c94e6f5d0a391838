"""Goodput: the highest rate of arrivals at which nine requests of ten keep below both limits, found by halving."""

import dataclasses
import math
from collections.abc import Sequence

GOOD_SHARE = 0.9
RESOLUTION = 1.15  # the lowest rate that was too high, over the highest that was good
_DEPTH = 16  # below the first rate by more than this, nothing is looked for


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What to try. limit: number of the limit whose goodput it is to narrow down."""

    rate: float
    limit: int


class Search:
    """Goodputs under several limits, loosest first: one run tells about all of them.

    For each in turn the rate is doubled or halved until one rate is good and another is not, then taken between them.
    """

    def __init__(self, *, start: float, highest: float, limits: int, possible: Sequence[bool]) -> None:
        """Rates are in requests per second; highest: every load is as one that comes all at once; possible: of each
        limit, whether any rate can be good."""
        self._start, self._lowest, self._highest = start, start / _DEPTH, highest
        self._good = [0.0] * limits
        self._bad = [math.inf if may else 0.0 for may in possible]

    @property
    def goodputs(self) -> list[float]:
        """The highest rate that was good, by limit; 0: none was."""
        return list(self._good)

    def attempt(self) -> Attempt | None:
        """What to try next; None when all is known."""
        for limit in range(len(self._good)):
            rate = self._between(self._good[limit], self._bad[limit])
            if rate is not None:
                return Attempt(rate=rate, limit=limit)
        return None

    def note(self, attempt: Attempt, shares: Sequence[float], *, complete: bool) -> None:
        """Shares of good requests by limit. A run that was given up says nothing of limits looser than the tried."""
        for limit, share in enumerate(shares):
            if complete and share >= GOOD_SHARE:
                self._good[limit] = max(self._good[limit], attempt.rate)
            elif complete or limit >= attempt.limit:
                self._bad[limit] = min(self._bad[limit], attempt.rate)

    def _between(self, good: float, bad: float) -> float | None:
        if good and math.isinf(bad):
            return 2 * good if good < self._highest else None
        if good:
            return math.sqrt(good * bad) if bad > good * RESOLUTION else None
        if math.isinf(bad):
            return self._start
        return bad / 2 if bad / 2 >= self._lowest else None


def allowed_misses(requests: int) -> int:
    """How many requests may miss a limit at a good rate."""
    return math.floor((1 - GOOD_SHARE) * requests + 1e-9)
