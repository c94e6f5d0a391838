"""A request of HTTP that generates: what asks to be let in, and what becomes of it in the executor."""

import asyncio
import dataclasses
import time

from starlette.types import Receive

from ingot.runtime.event_queue import EventQueue
from ingot.runtime.server.api_error import ClientGoneError, failed
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.middleware import RequestContext
from ingot.runtime.text_stream import TextEvent, TextStream


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What asks to be let in.

    answer_id     of the answer
    prompts, n    how many prompts, and sequences of each
    timeout       seconds from now to the end; None: the server's
    prompt_alone  only the prompts are computed: the one token that a sequence draws is not part of the answer
    guided        a grammar has to be made for it
    """

    answer_id: str
    caller: RequestContext
    prompts: int = 1
    n: int = 1
    timeout: float | None = None
    prompt_alone: bool = False
    guided: bool = False

    @property
    def count(self) -> int:
        """Sequences."""
        return self.prompts * self.n


class Generation:
    """One HTTP request in the executor: its prompts, each with its sequences."""

    def __init__(self, order: Order, queue: EventQueue, metrics: Metrics) -> None:
        self.answer_id, self.caller, self.count, self.queue = order.answer_id, order.caller, order.count, queue
        self.prompt_alone = order.prompt_alone
        self.created = int(time.time())
        self.arrived = time.monotonic()
        self.groups: list[list[TextStream]] = []
        self.preparation: asyncio.Future[None] | None = None
        self.watch: asyncio.Task[None] | None = None  # for the client to leave
        self.deadline: asyncio.TimerHandle | None = None
        self.generated = 0  # tokens of all sequences
        self.reasoning = 0  # of these, those that are no part of the answers
        self.moments: dict[str, float] = {}  # when the first sequence to do so had its first step, its first token
        self._metrics = metrics
        # (prompt, sequence) → when its first and its last token came, and how many
        self._times: dict[tuple[int, int], tuple[float, float, int]] = {}

    async def give_up_with(self, receive: Receive) -> None:
        """End the wait for events when the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.queue.interrupt(ClientGoneError())

    @property
    def given_up(self) -> bool:
        """Whether nobody wants an answer any more. From any thread."""
        return self.queue.stopped.done()

    async def events(self) -> list[TextEvent]:
        """What is new; empty when poked. Raises ApiError and ClientGoneError."""
        events = []
        for when, event in await self.queue.drain():
            if event.error is not None:
                raise failed(event.error)
            self._count(when, event)
            events.append(event)
        return events

    @property
    def finished(self) -> bool:
        """Whether every sequence has had its last event."""
        return bool(self.groups) and all(stream.done for group in self.groups for stream in group)

    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(group[0].request.num_prompt for group in self.groups)

    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache gave."""
        firsts = [group[0].request for group in self.groups]
        return sum(min(each.num_cached or 0, each.num_prompt) for each in firsts)  # not of an answer that goes on

    def _count(self, when: float, event: TextEvent) -> None:
        key, count = (event.index, event.sequence), len(event.token_ids)
        if self.prompt_alone:
            if count:
                self._begin(event, when)
            return
        self.generated += count
        self.reasoning += event.num_reasoning
        first, last, tokens = self._times.get(key, (when, when, 0))
        if count and not tokens:
            started = self._begin(event, when)
            self._metrics.first_token(when - self.arrived)
            self.moments = self.moments or {"first_step": started, "first_token": when}
            self._metrics.more_tokens(0.0, count - 1)
        elif count:
            self._metrics.more_tokens(when - last, count)
        tokens += count
        self._times[key] = (first, when if count else last, tokens)
        if event.finish_reason is not None and tokens > 1:
            self._metrics.sequence_ended((self._times[key][1] - first) / (tokens - 1))

    def _begin(self, event: TextEvent, when: float) -> float:
        """A sequence's prompt is computed. Returns when its first step began."""
        request = self.groups[event.index][event.sequence].request
        started = request.started or when
        self._metrics.first_step(started - self.arrived, request.num_prompt)
        return started
