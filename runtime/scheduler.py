"""Decides how many tokens of which request the next step computes. It has no prefill or decode mode.

    one step        max_num_tokens = 32, tiles of 8 tokens
    ┌───┬───┬───┬───────────────┬──────────────────┐
    │ A │ B │ C │ D D D D D     │ E E E ... 16 E's │   A, B, C: one pending token each (they decode)
    └───┴───┴───┴───────────────┴──────────────────┘   D: the rest of its prompt; E: a chunk that ends on a tile

First the requests with a single pending token, then other running ones, then waiting ones. Within each the order is
`Request.order`: arrival, moved by priority.
"""

import bisect
import dataclasses
import operator
import time
from collections.abc import Iterable, Mapping, Sequence

from ingot.configs.runtime import Policy
from ingot.plan import Limits
from ingot.runtime.block_manager import BlockManager, Hits
from ingot.runtime.reports import GroupBlocks, Stats
from ingot.runtime.request import Request
from ingot.runtime.steady_decode import SteadyDecode
from ingot.runtime.step_times import StepTimes

_TILE = 16  # rows of a tile of the matrix kernels

_order = operator.attrgetter("order")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TpotBudget:
    """Keeps steps that carry decode rows within `tpot_target` milliseconds, by what `times` predicts."""

    times: StepTimes
    tpot_target: float


@dataclasses.dataclass(kw_only=True, slots=True)
class _Step:
    """A step in the making: what it computes, the tokens and rows of logits that are left, and how many requests it may
    have."""

    tokens: int
    rows: int
    requests: int
    chunks: dict[Request, int] = dataclasses.field(default_factory=dict)
    decode_rows: int = 0

    def add(self, request: Request, count: int) -> None:
        self.chunks[request] = count
        self.tokens -= count
        self.rows -= request.logit_rows(count)


class Scheduler:
    """Keeps every step within max_num_tokens, max_batch_size and max_logit_rows, and every request within its blocks.

    The first request by order is never preempted, nobody starts before it while it waits for room, and `BlockManager`
    must have room for any single request (the executor checks that when one arrives). As orders never change, everyone
    becomes the first some day. So every request ends.

    mixed          False: a step carries either whole prompts or decode rows
    prefill_chunk  tokens of prompts at most in a step with decode rows; None: as many as it has left
    tpot_budget    decides that instead, where there is one
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        policy: Policy,
        *,
        mixed: bool = True,
        prefill_chunk: int | None = None,
        tpot_budget: TpotBudget | None = None,
    ) -> None:
        self._limits, self._blocks, self._policy, self._mixed = limits, blocks, policy, mixed
        self._prefill_chunk, self.tpot_budget = prefill_chunk, tpot_budget
        self._tile = min(_TILE, blocks.tokens_per_block)
        self.running: list[Request] = []  # by order
        self.waiting: list[Request] = []  # by order
        self.preempted_for_others = self.preempted_for_itself = 0
        self.preempted_tokens = self.prefix_hit_tokens = 0
        self._steady: SteadyDecode | None = None  # the requests that have decoded alone since somebody came or went

    @property
    def most_running(self) -> int:
        """Requests that take part in steps at any time."""
        return self._limits.max_batch_size

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def preemptions(self) -> int:
        return self.preempted_for_others + self.preempted_for_itself

    def stats(self) -> Stats:
        """Where things stand now."""
        blocks = self._blocks
        return Stats(
            blocks_total=blocks.num_blocks,
            blocks_used=blocks.num_used,
            blocks_cached=blocks.num_cached,
            blocks_by_group=[
                GroupBlocks(window=pool.window, total=pool.num_blocks, used=pool.num_used, cached=pool.num_cached)
                for pool in blocks.pools
            ],
            requests_running=len(self.running),
            requests_waiting=len(self.waiting),
            preemptions=self.preemptions,
            preempted_for_others=self.preempted_for_others,
            preempted_for_itself=self.preempted_for_itself,
            preempted_tokens=self.preempted_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
        )

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._steady = None
        bisect.insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, wherever it is; its blocks are free or cached at once."""
        self._steady = None
        _remove(self.running if request.blocks.count else self.waiting, request)
        self._blocks.release(request.blocks)

    def schedule(self, most: int | None = None, prompt_tokens: int | None = None) -> dict[Request, int]:
        """The next step: number of pending tokens to compute per request, all at least 1. Reserves their blocks.

        Requests of steps under way keep their blocks. They take part as long as they have pending tokens: those of a
        prompt, which need no result of the steps before.

        most           requests that the step may have beside these; None: as many as limits allow
        prompt_tokens  of prompts that the step may have, where it may have parts of them; None: as many as limits allow
        """
        self._steady = None
        share = self._limits.max_batch_size if most is None else most
        step = _Step(tokens=self._limits.max_num_tokens, rows=self._limits.max_logit_rows, requests=share)
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.running:
            left, under_way = request.num_tokens - request.num_computed, request.num_under_way
            if left > under_way:
                (decoding if left == 1 else prefilling).append(request)
        if self._mixed:
            self._decode(step, decoding)
            self._limit_prefill(step, prompt_tokens)
        self._continue(step, prefilling)
        self._admit(step)
        if not step.chunks:
            self._decode(step, decoding)
        return step.chunks

    def repeatable(self, chunks: dict[Request, int], steps: int) -> int:
        """How many steps, at most `steps`, would be `chunks` again and again if nobody comes, goes or ends meanwhile.
        Reserves their blocks.

        Where every running request decodes, a waiting one has no room until somebody ends.
        """
        if steps == 1 or len(chunks) < len(self.running) or not all([request.repeats for request in chunks]):
            return 1
        steps = min(steps, *[len(request.tokens) - request.num_tokens for request in chunks])
        while steps > 1:
            if self._blocks.reserve([(request.blocks, request.num_tokens + steps - 1) for request in chunks]):
                break
            steps //= 2
        return max(steps, 1)

    def following(self, chunks: Mapping[Request, int]) -> Sequence[Request]:
        """Who decodes in the step after `chunks`, whose results are not there yet: those that do not end then. Nobody
        where the host has to decide first. Reserves their blocks.

        Where a request waits, it has room as soon as another one ends or a prompt is computed.
        """
        steady_decode, self._steady = self._steady, None
        if steady_decode is not None and steady_decode.chunks is chunks and steady_decode.goes_on():
            if not self._reserve_all(steady_decode.due):
                return ()
            steady_decode.note(steady_decode.due)
            self._steady = steady_decode
            return steady_decode.requests
        live = [request for request in chunks if not request.finished]
        going = [request for request in live if len(request.tokens) - request.num_tokens > 1]
        steady = len(going) == len(chunks) and all([request.repeats for request in going])
        if len(live) < len(self.running) or (self.waiting and not steady):
            return ()
        if not all([request.may_follow(chunks[request]) for request in going]) or not self._reserve_all(going):
            return ()
        if steady:
            self._steady = SteadyDecode(chunks, self._blocks.tokens_per_block)
        return going

    def _reserve_all(self, requests: Sequence[Request]) -> bool:
        """Blocks for the token after the known ones of each."""
        return self._blocks.reserve([(request.blocks, request.num_tokens + 1) for request in requests])

    def _decode(self, step: _Step, requests: list[Request]) -> None:
        """Requests with a single pending token: each takes one token and one row. The loop of every step: kept lean."""
        size, room = self._blocks.tokens_per_block, min(step.tokens, step.rows, step.requests)
        for request in requests:
            if len(step.chunks) == room:
                break
            blocks = request.blocks  # none: they were taken for one before it
            if blocks.count and (request.num_tokens <= blocks.covered * size or self._reserve(request)):
                step.chunks[request] = 1
        step.decode_rows = len(step.chunks)
        step.tokens -= step.decode_rows
        step.rows -= step.decode_rows

    def _limit_prefill(self, step: _Step, most: int | None) -> None:
        """Leave at most `most` tokens for prompts. Beside decode rows, leave no more than the TPOT target allows, but
        at least a tile; without a target, a chunk."""
        if most is not None:
            step.tokens = min(step.tokens, most)
        if not step.decode_rows:
            return
        if self.tpot_budget is not None:
            allowed = self.tpot_budget.times.budget(self.tpot_budget.tpot_target) - step.decode_rows
            step.tokens = min(step.tokens, max(allowed, self._tile))
        elif self._prefill_chunk is not None:
            step.tokens = min(step.tokens, self._prefill_chunk)

    def _continue(self, step: _Step, requests: list[Request]) -> None:
        for request in requests:
            goes_on = request.num_under_way > 0
            if len(step.chunks) >= step.requests and not goes_on:
                continue
            if request.blocks.count and (count := self._chunk(request, step, self._blocks.reach(request.blocks))):
                self._blocks.cover(request.blocks, request.num_begun + count)
                step.add(request, count)
                step.requests += goes_on

    def _admit(self, step: _Step) -> None:
        place = 0
        while (
            place < len(self.waiting)
            and len(self.running) < self._limits.max_batch_size
            and len(step.chunks) < step.requests
        ):
            request = self.waiting[place]
            hits = self._blocks.lookup(request.blocks, request.tokens, request.first_logit_position())
            if hits is None:  # soon it finds more; those behind it need not wait for that
                place += 1
                continue
            request.num_computed = hits.count * self._blocks.tokens_per_block
            count = self._chunk(request, step, self._blocks.reach(request.blocks, hits))
            if not count or not self._has_room(request, hits):
                request.num_computed = 0
                break
            known = request.tokens[: request.num_tokens]
            started = self._blocks.start(request.blocks, hits, known, request.max_cached_tokens)
            assert started, "_has_room counted the blocks"
            self._blocks.cover(request.blocks, request.num_computed + count)
            self._count_hits(request)
            del self.waiting[place]
            bisect.insort(self.running, request, key=_order)
            step.add(request, count)

    def _chunk(self, request: Request, step: _Step, reach: int) -> int:
        """How many pending tokens of a prompt come next. A chunk ends with the known tokens or on a tile; the first
        chunk of a step that has no room for that ends anywhere, so that no request waits for ever.

        reach  tokens for which there are blocks
        """
        if step.tokens <= 0 or step.rows <= 0:
            return 0
        first = len(step.chunks) == step.decode_rows
        begun = request.num_begun
        count = request.fitting(min(request.num_pending, step.tokens, reach - begun), step.rows)
        if count == request.num_pending:
            return count
        if not first and not self._mixed:
            return 0
        end = (begun + count) // self._tile * self._tile
        if end > begun:
            return end - begun
        return max(count, 0) if first else 0

    def _reserve(self, request: Request) -> bool:
        """Blocks for all known tokens of a running request. May preempt later ones, in the end the request itself; that
        one waits instead while others are under way, which may give blocks soon."""
        while not self._blocks.reserve([(request.blocks, request.num_tokens)]):
            later = self.running[bisect.bisect_right(self.running, request.order, key=_order) :]
            later = [other for other in later if not other.num_under_way]
            if not later and any(other.num_under_way for other in self.running):
                return False
            if not later:
                self.preempted_for_itself += 1
                self._preempt(request)
                return False
            self.preempted_for_others += 1
            self._preempt(min(later, key=self._cost))
        return True

    def _cost(self, request: Request) -> tuple[bool, int, int]:
        """What preempting a request costs: tokens to compute again if the blocks that only it holds are lost. One that
        gives no block is the worst choice; among equals, the last goes.

        A request that needs a block has a single pending token, and these come in that order: a later request is
        never part of the step yet.
        """
        alone = self._blocks.num_alone(request.blocks)
        shared = (request.blocks.count - alone) * self._blocks.tokens_per_block
        return alone == 0, max(request.num_computed - shared, 0), -request.order[0]

    def preempt(self, requests: Iterable[Request]) -> None:
        """Send those that run back to wait, where a step of theirs has failed."""
        for request in requests:
            if request.blocks.count:
                self.preempted_for_itself += 1
                self._preempt(request)

    def _preempt(self, victim: Request) -> None:
        """Send a running request back to wait; what is not in the cache then is computed again."""
        _remove(self.running, victim)
        self._blocks.release(victim.blocks)
        victim.num_lost, victim.num_computed = victim.num_computed, 0
        self.add(victim)

    def _count_hits(self, request: Request) -> None:
        """A start counts what the cache gave; another start after preemption, what it did not give back."""
        if request.num_cached is None:
            request.started = time.monotonic()
            request.num_cached = request.num_computed
            self.prefix_hit_tokens += request.num_computed
        else:
            self.preempted_tokens += max(request.num_lost - request.num_computed, 0)

    def _has_room(self, request: Request, hits: Hits) -> bool:
        """Whether a waiting request may start, given the blocks it finds in the cache.

        guaranteed_no_evict: whatever it and the running ones still need, up to their whole lengths, is available.
        max_utilization: its known tokens fit, and one more block for each running request that can still grow, so
        that the start of this one preempts none at once.
        Both: in cache groups with windows, which need few blocks, whatever it and the running ones still need.
        """
        missing = [self._blocks.missing(other.blocks, other.max_cached_tokens) for other in self.running]
        most = request.max_cached_tokens
        if self._policy is Policy.GUARANTEED_NO_EVICT:
            return self._blocks.has_room(hits, most, most, beside=sum(missing))
        beside = sum(count > 0 for count in missing)
        return self._blocks.has_room(hits, request.num_tokens, most, beside)


def _remove(queue: list[Request], request: Request) -> None:
    place = bisect.bisect_left(queue, request.order, key=_order)
    assert queue[place] is request, "a queue is sorted by order"
    del queue[place]
