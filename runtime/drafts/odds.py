"""How likely a draft is right, learned from those before it.

A draft behind a longer match is right more often, and so is one behind a right draft, which makes the match longer. So
each length of a match has its own share of right drafts, of this request and, while it has had few, of all requests.
"""

from collections.abc import Sequence

MOST_MATCHED = 16  # a longer match counts as one of this length
_FADING = 0.98  # what came before counts less with every draft
_RESTING = 0.998  # the same for each draft that is not tried
_SHARED = 3.0  # drafts of this request that count as much as all those of other requests
_FIRST_GUESS = (0.2, 0.4, 0.6, 0.7, 0.8)  # before any draft, by length


class Odds:
    """Those of one request, or of all.

    common       those of all requests, on which a request with few drafts relies
    first_guess  without them: before any draft, by length
    """

    def __init__(self, common: "Odds | None" = None, *, first_guess: Sequence[float] = _FIRST_GUESS) -> None:
        self._right = [0.0] * (MOST_MATCHED + 1)
        self._tried = [0.0] * (MOST_MATCHED + 1)
        self._common, self._first_guess = common, first_guess

    def right(self, matched: int) -> float:
        """The share of drafts behind a match of `matched` tokens that are right."""
        place = min(matched, MOST_MATCHED)
        if self._common is None:
            guess, weight = self._first_guess[min(place, len(self._first_guess)) - 1], 1.0
        else:
            guess, weight = self._common.right(place), _SHARED
        return (self._right[place] + weight * guess) / (self._tried[place] + weight)

    def gains(self, matched: int, count: int) -> Sequence[float]:
        """How likely each of `count` drafts behind such a match is right, and all before it."""
        found, likely = [], 1.0
        for place in range(count):
            likely *= self.right(matched + place)
            found.append(likely)
        return found

    def learn(self, matched: int, drafted: int, right: int) -> None:
        """The first `right` of `drafted` drafts behind a match were right; those behind the first wrong one tell
        nothing."""
        for place in range(min(right + 1, drafted)):
            at = min(matched + place, MOST_MATCHED)
            self._right[at] = _FADING * self._right[at] + (place < right)
            self._tried[at] = _FADING * self._tried[at] + 1.0
        if self._common is not None:
            self._common.learn(matched, drafted, right)

    def rest(self, matched: int) -> None:
        """A draft behind a match of `matched` tokens was not worth a try. What speaks against it fades, so that it gets
        a try again."""
        place = min(matched, MOST_MATCHED)
        self._right[place] *= _RESTING
        self._tried[place] *= _RESTING
        if self._common is not None:
            self._common.rest(matched)
