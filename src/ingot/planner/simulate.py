"""Requests on replicas in virtual time: the real scheduler, block manager and step loop, over a session that computes
nothing.

    arrivals ─▶ router: the less loaded of two replicas ─▶ Replica: Scheduler, BlockManager, VirtualLoop, VirtualSession
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ingot.configs.runtime import Policy
from ingot.plan import Limits
from ingot.planner.clock import Clock
from ingot.planner.device import Float64
from ingot.planner.virtual import VirtualLoop, VirtualSession
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.outlet import Outlet
from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What requests saw, in seconds, in their order. ttft: from arrival; tpot: NaN of those with one token.

    seconds  until the last one ended; busy: of these, in steps, of all replicas together
    """

    ttft: Float64
    tpot: Float64
    seconds: float
    busy: float
    steps: int
    tokens: int
    preemptions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """limits, num_blocks, tokens_per_block, windows: of the engine; prefill_chunk: see `Scheduler`."""

    limits: Limits
    num_blocks: tuple[int, ...]
    tokens_per_block: int
    windows: tuple[int, ...] = (0,)
    prefill_chunk: int | None = None


class Replica:
    """One engine in virtual time.

    outstanding  requests that have come and not ended
    """

    def __init__(self, clock: Clock, options: ReplicaOptions) -> None:
        blocks = BlockManager(options.num_blocks, options.tokens_per_block, windows=options.windows, prefix_cache=False)
        self.session = VirtualSession(clock, options.num_blocks)
        self.scheduler = Scheduler(options.limits, blocks, Policy.MAX_UTILIZATION, prefill_chunk=options.prefill_chunk)
        self._loop, self._outlet = VirtualLoop(self.session, self.scheduler, blocks), Outlet()
        self._places: dict[Request, int] = {}

    @property
    def outstanding(self) -> int:
        return len(self._places)

    def add(self, place: int, lengths: tuple[int, int], arrival: float) -> None:
        """Raises CapacityError for a request that can never run. place: of the request, in the arrays of `advance`."""
        request = Request(np.zeros(lengths[0], np.int32), max_new_tokens=lengths[1])
        self._loop.require_fits([request])
        if not self._loop.has_work:
            self.session.now = max(self.session.now, arrival)
        self._places[request] = place
        self._loop.add([request], self._outlet)

    def advance(self, until: float, first: Float64, last: Float64) -> None:
        """Run steps that begin before this time. first, last: get when requests had their first and last tokens."""
        session = self.session
        while self._loop.has_work and session.now < until:
            session.until, self._loop.most_steps = until, session.most_steps
            for request, seconds in self._loop.skip().items():
                first[self._places[request]] = seconds
            self._loop.step()
            for request, count, ended in self._outlet.get(timeout=0):
                place = self._places[request]
                if ended:
                    if request.error is not None:
                        raise request.error
                    del self._places[request]
                if count and np.isnan(first[place]):
                    first[place] = session.now
                last[place] = session.now


def simulate(
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float],
    clock: Clock,
    options: ReplicaOptions,
    *,
    replicas: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Served:
    """Requests of (prompt tokens, generated tokens) that arrive at these seconds, in order. Each goes to the replica
    with fewer requests, of two that are drawn by chance. progress: is told how many have come.

    Raises CapacityError for a request that can never run.
    """
    servers = [Replica(clock, options) for _ in range(replicas)]
    first, last = np.full(len(lengths), np.nan), np.full(len(lengths), np.nan)
    random = np.random.default_rng(0)
    pairs = random.integers(0, replicas, (len(lengths), 2)) if replicas > 1 else np.zeros((len(lengths), 1), np.int64)
    for place, (arrival, pair) in enumerate(zip(arrivals, pairs.tolist(), strict=True)):
        drawn = [servers[number] for number in dict.fromkeys(pair)]
        for server in drawn:
            server.advance(arrival, first, last)
        min(drawn, key=lambda server: server.outstanding).add(place, lengths[place], arrival)
        progress(place)
    for server in servers:
        server.advance(float("inf"), first, last)
    news = np.array([new for _, new in lengths])
    tpot = np.where(news > 1, (last - first) / np.maximum(news - 1, 1), np.nan)
    return Served(
        ttft=first - np.array(arrivals),
        tpot=tpot,
        seconds=max(server.session.now for server in servers) - min(arrivals),
        busy=sum(server.session.busy for server in servers),
        steps=sum(server.session.steps for server in servers),
        tokens=int(news.sum()),
        preemptions=sum(server.scheduler.preemptions for server in servers),
    )
