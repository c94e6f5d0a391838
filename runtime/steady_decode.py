"""Requests that decode, step after step: who of them needs a block for which step, and how long all of them go on.

step        1    2    3    4    5
request A   .    block .   .    .        a step costs what is due then, not a look at every request
request B   .    .    .    block .
request C   .    .    .    .    its last token: from here on somebody else decides
"""

from collections.abc import Iterable, Mapping, Sequence

from ingot.runtime.request import Request


class SteadyDecode:
    """chunks: of the step under way, in which all requests decode; the next one has its blocks. It holds as long as
    nobody comes, ends or is preempted, and each step adds a token to each request."""

    def __init__(self, chunks: Mapping[Request, int], tokens_per_block: int) -> None:
        self.chunks, self.requests = chunks, tuple(chunks)
        self._size = tokens_per_block
        self._step = 0  # that were asked about
        self._last = min(len(request.tokens) - request.num_tokens for request in self.requests) - 1
        self._due: dict[int, list[Request]] = {}  # step → those whose blocks end before it
        self.note(self.requests)

    def goes_on(self) -> bool:
        """Whether all of them are in the next step too. Call once for each step."""
        self._due.pop(self._step, None)
        self._step += 1
        return self._step < self._last

    @property
    def due(self) -> Sequence[Request]:
        """Who has no block for the next step."""
        return self._due.get(self._step, ())

    def note(self, requests: Iterable[Request]) -> None:
        """These have blocks for the next step, and maybe for some more."""
        for request in requests:
            steps = max(request.blocks.covered * self._size - request.num_tokens, 1)
            self._due.setdefault(self._step + steps, []).append(request)
