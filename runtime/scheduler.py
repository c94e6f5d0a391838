"""Decides how many tokens of which request the next step computes. It has no prefill or decode mode.

    one step        max_num_tokens = 16
    ┌───┬───┬───┬───────────────┬─────────┐
    │ A │ B │ C │ D D D D D D D │ E E E E │   A, B, C: one pending token each (they decode)
    └───┴───┴───┴───────────────┴─────────┘   D: the rest of its prompt; E: a chunk of its prompt, more to come

First the requests with a single pending token, then other running ones, then waiting ones, each oldest first.
`running` and `waiting` are in order of arrival, and every running request is older than every waiting one.
"""

from collections import deque

from ingot.configs.runtime import Policy
from ingot.plan import Limits
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.request import Request


class Scheduler:
    """Keeps every step within max_num_tokens, max_batch_size and max_logit_rows, and every request within its blocks.

    The oldest request always advances: only younger ones are preempted for it, and `BlockManager` must have room for
    any single request (the executor checks that when one arrives). So every request ends.
    """

    def __init__(self, limits: Limits, blocks: BlockManager, policy: Policy) -> None:
        self._limits, self._blocks, self._policy = limits, blocks, policy
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request that is younger than all others."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, wherever it is; its blocks are free at once."""
        (self.running if request in self.running else self.waiting).remove(request)
        self._blocks.release(request.blocks)

    def schedule(self) -> dict[Request, int]:
        """The next step: number of pending tokens to compute per request, all at least 1. Reserves their blocks."""
        chunks: dict[Request, int] = {}
        tokens, rows = self._limits.max_num_tokens, self._limits.max_logit_rows
        for request in sorted(self.running, key=lambda request: request.num_pending > 1):
            if not request.blocks.count:
                continue  # preempted for one before it
            count = request.fitting(min(request.num_pending, tokens), rows)
            if count > 0 and self._reserve(request):
                chunks[request] = count
                tokens, rows = tokens - count, rows - request.logit_rows(count)
        while self.waiting and len(self.running) < self._limits.max_batch_size:
            request = self.waiting[0]
            count = request.fitting(min(request.num_pending, tokens), rows)
            if count <= 0 or not self._has_room(request):
                break
            self.running.append(self.waiting.popleft())
            reserved = self._blocks.reserve(request.blocks, request.num_tokens)
            assert reserved, "_has_room counted the blocks"
            chunks[request] = count
            tokens, rows = tokens - count, rows - request.logit_rows(count)
        return chunks

    def _reserve(self, request: Request) -> bool:
        """Blocks for all known tokens of a running request; may preempt the youngest, in the end the request itself."""
        while not self._blocks.reserve(request.blocks, request.num_tokens):
            self._preempt()
            if not request.blocks.count:
                return False
        return True

    def _preempt(self) -> None:
        """Send the youngest running request back to the head of the queue; its tokens will be computed again.

        Whoever needs a block has a single pending token, and those come oldest first: the youngest running request
        is never part of the step yet.
        """
        victim = self.running.pop()
        self._blocks.release(victim.blocks)
        victim.num_computed = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1

    def _has_room(self, request: Request) -> bool:
        """Whether a waiting request may start.

        guaranteed_no_evict: its whole length fits beside the whole lengths of the running ones.
        max_utilization: its known tokens fit, and one more block for each running request that can still grow, lest
        the start of this one preempt it at once.
        """
        if self._policy is Policy.GUARANTEED_NO_EVICT:
            whole = [self._blocks.blocks_for(other.max_cached_tokens) for other in (*self.running, request)]
            return sum(whole) <= self._blocks.num_blocks
        growing = sum(self._blocks.missing(other.blocks, other.max_cached_tokens) > 0 for other in self.running)
        return self._blocks.blocks_for(request.num_tokens) + growing <= self._blocks.num_free
