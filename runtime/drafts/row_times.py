"""How long steps take here by their rows, learned from those that ran.

seconds │                    ●  . .   beyond the rows that were seen: a guess
        │       ●     ●   ●           between them: a curve below the line
        │ ● ●  ●
        └────────────────────────▶ rows
"""

import bisect

_LEARNING = 0.2  # how far one step moves what is known
_OUTLIER = 2.0  # a step counts as at most this many times longer than expected
_LASTING = 512  # steps after which a time counts as unknown: contexts have other lengths then
_LEAST = 1e-9  # seconds of a step: a clock may stand still meanwhile
_CHEAP_ROWS = 8  # up to so many rows, reading weights takes most of a step
_FURTHER = 0.5  # of the time in proportion to rows: what more rows are expected to cost, so that they get a try
_LEAP = 2  # times as many rows as were seen, at most, in a step that is a try


class RowTimes:
    """The times of decode steps, by their rows."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # ascending
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}  # the step in which each was seen last
        self._steps = 0

    def knows(self, rows: int) -> bool:
        """Whether a step of this many rows has run lately, or of fewer."""
        return bool(self._rows) and self._rows[0] <= rows

    @property
    def most_rows(self) -> int:
        """Rows that a step may try."""
        return max(_LEAP * self._rows[-1], 2 * _CHEAP_ROWS) if self._rows else _CHEAP_ROWS

    def predict(self, rows: int) -> float:
        """Seconds of a step of this many rows. Some step must have run."""
        if rows in self._seconds:
            return self._seconds[rows]
        above = bisect.bisect(self._rows, rows)
        if above == len(self._rows):
            return self._seconds[self._rows[-1]] * _growth(rows, self._rows[-1])
        after = self._rows[above]
        if above == 0:
            return self._seconds[after] / _growth(after, rows)
        before = self._rows[above - 1]
        share = ((rows - before) / (after - before)) ** 2  # less than along a line, so that these rows get a try
        return (1 - share) * self._seconds[before] + share * self._seconds[after]

    def observe(self, rows: int, seconds: float) -> None:
        """A step of this many rows took `seconds`."""
        self._steps += 1
        seconds, known = max(seconds, _LEAST), self._seconds.get(rows)
        if known is None:
            bisect.insort(self._rows, rows)
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] = known + _LEARNING * (min(seconds, _OUTLIER * known) - known)
        self._seen[rows] = self._steps
        oldest = min(self._seen, key=lambda each: self._seen[each])
        if self._seen[oldest] + _LASTING < self._steps:
            self._rows.remove(oldest)
            del self._seconds[oldest], self._seen[oldest]


def _growth(rows: int, before: int) -> float:
    """How many times as long a step of `rows` rows is expected to take as one of `before`, where nobody has seen it."""
    return 1 + _FURTHER * (max(rows, _CHEAP_ROWS) / max(before, _CHEAP_ROWS) - 1)
