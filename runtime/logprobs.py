"""Probabilities of a request's tokens → what users see of them."""

import dataclasses
from collections.abc import Callable, Sequence

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


def _as_table(one: TokenProbs, decode: Callable[[int], str] | None) -> LogprobTable:
    ranked = [(one.token, one.log_prob, one.rank)]
    ranked += [
        (token, log_prob, place)
        for place, (token, log_prob) in enumerate(zip(one.top_ids.tolist(), one.top_log_probs.tolist(), strict=True), 1)
        if token != one.token
    ]
    return {token: Logprob(log_prob, rank, decode and decode(token)) for token, log_prob, rank in ranked}
