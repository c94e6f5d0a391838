"""Drafts from a request's own tokens: what came after the last ones when they came before (prompt lookup).

    tokens   a b c d e a b c         the last three came before:
    drafts                   d e a   what came then, and on into the drafts themselves

Text that repeats itself is drafted well: edits of a text, answers from a document, code, tool calls. The idea is Apoorv
Saxena's prompt lookup decoding (2023).
"""

from collections.abc import Mapping

import numpy as np

from ingot.configs.speculation import Speculation
from ingot.runtime.request import Request
from ingot.step_io import Int32


def lookup(tokens: Int32, shortest: int, longest: int, most: int) -> tuple[Int32, int]:
    """Drafts of what follows int32 [n] tokens, int32 [at most `most`], and how many of the last tokens came before.

    The place counts where most of the last tokens came before, up to `longest`, and the latest of several. If even the
    last `shortest` did not come before, there are no drafts.
    """
    end = len(tokens)
    places = np.flatnonzero(tokens[: end - 1] == tokens[-1])  # of tokens that are the last of a match
    matched = 1
    while matched < longest and len(places):
        longer = places[np.searchsorted(places, matched) :]
        longer = longer[tokens[longer - matched] == tokens[end - 1 - matched]]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    if not len(places) or matched < shortest or most < 1:
        return tokens[:0], 0
    behind = int(places[-1]) + 1
    return np.resize(tokens[behind : behind + most], most), matched  # where these end, the same come again


class Lookup:
    """The drafter that looks drafts up. It takes no time worth counting."""

    def __init__(self, speculation: Speculation) -> None:
        self._shortest, self._longest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
        self._found: dict[Request, Int32] = {}

    def match(self, request: Request, most: int) -> tuple[int, int]:
        """See Drafter: the number is that of the tokens that came before."""
        drafts, matched = lookup(request.tokens[: request.num_tokens], self._shortest, self._longest, most)
        self._found[request] = drafts
        return len(drafts), matched

    def seconds(self, requests: int, depth: int) -> float:
        """See Drafter."""
        return 0.0

    def make(self, counts: Mapping[Request, int]) -> Mapping[Request, Int32]:
        """See Drafter."""
        return {request: self._found[request][:count] for request, count in counts.items()}

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._found.pop(request, None)

    def close(self) -> None:
        """See Drafter."""
