"""Probabilities of a request's tokens → what users see of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import overload

from ingot.runtime.request import TokenProbs


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """logprob: natural logarithm of the probability before any sampling parameter; rank: 1 is the most likely token.

    decoded  the text that the token adds after other text; None from `ModelRunner`, which has no tokenizer
    """

    logprob: float
    rank: int
    decoded: str | None = None


LogprobTable = dict[int, Logprob]
"""Token id → its probability at one place: the actual token first, then the most likely ones."""


def as_tables(probs: Sequence[TokenProbs], decode: Callable[[int], str] | None = None) -> list[LogprobTable]:
    """One table per place."""
    return [_as_table(one, decode) for one in probs]


class PromptTables(Sequence[LogprobTable | None]):
    """One table per prompt token, None for the first, each made whenever it is asked for: a long prompt has many, and
    the thread that hands them over has others to serve."""

    def __init__(self, probs: Sequence[TokenProbs], decode: Callable[[int], str] | None = None) -> None:
        self._probs, self._decode = probs, decode

    def __len__(self) -> int:
        return 1 + len(self._probs)

    @overload
    def __getitem__(self, place: int) -> LogprobTable | None: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[LogprobTable | None]: ...

    def __getitem__(self, place: int | slice) -> LogprobTable | Sequence[LogprobTable | None] | None:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        place = range(len(self))[place]
        return None if place == 0 else _as_table(self._probs[place - 1], self._decode)


def _as_table(one: TokenProbs, decode: Callable[[int], str] | None) -> LogprobTable:
    ranked = [(one.token, one.log_prob, one.rank)]
    ranked += [
        (token, log_prob, place)
        for place, (token, log_prob) in enumerate(zip(one.top_ids.tolist(), one.top_log_probs.tolist(), strict=True), 1)
        if token != one.token
    ]
    return {token: Logprob(log_prob, rank, decode and decode(token)) for token, log_prob, rank in ranked}
