"""Requests of HTTP on their way through the executor: who is in, who must wait outside, who is cancelled.

    start ──thread pool──▶ template, tokenizer, executor.add ──▶ Generation ──events──▶ the answer
                                                                   release: from any end, blocks come back

The event loop never waits for a step, a template or a tokenizer.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.types import Receive

from ingot.configs.generation import GenerationDefaults
from ingot.configs.serve import ServeConfig
from ingot.errors import IngotError
from ingot.runtime.answers.answer_formats import AnswerFormats
from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.detokenizer_thread import DetokenizerThread
from ingot.runtime.event_queue import EventQueue, LoopBridge
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.server.api_error import (
    ApiError,
    ClientGoneError,
    cancelled,
    failed,
    refused,
    shutting_down,
    timed_out,
)
from ingot.runtime.server.health import HealthMonitor, PrepareExecutor, Result
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.middleware import RequestContext
from ingot.runtime.server.request_log import RequestLog
from ingot.runtime.server.sampling_params import check_logprobs
from ingot.runtime.server.tracing import Tracer
from ingot.runtime.text_stream import TextEvent, TextRequest, TextStream, make_streams
from ingot.runtime.tokenizer import Tokenizer

_GUIDED_THREADS = 2


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


class Service:
    """Lives on one event loop; `texts` and `runner` have threads of their own."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        formats: AnswerFormats,
        defaults: GenerationDefaults,
        config: ServeConfig,
        metrics: Metrics,
    ) -> None:
        self.runner, self.tokenizer, self.templates, self.formats = runner, tokenizer, templates, formats
        self.defaults, self.config, self.metrics = defaults, config, metrics
        self.log = RequestLog(metrics, lines=config.log_requests)
        self._loop = asyncio.get_running_loop()
        self._bridge = LoopBridge(self._loop)
        self.texts = DetokenizerThread(runner, tokenizer, self._wake)
        self.failed = asyncio.Event()  # a thread has ended that should not have ended: see `texts.failure`
        self._pool = PrepareExecutor()
        self._guided_pool = PrepareExecutor(_GUIDED_THREADS)  # apart: a grammar may take seconds to compile
        self.pulse = HealthMonitor(self.texts, self._pool, config.stall_timeout)
        self.active: dict[str, Generation] = {}  # by answer_id
        self._discarded: set[asyncio.Task[None]] = set()
        self.draining = False
        self.sequences = 0  # in the executor, or on the way in or out
        metrics.watch(lambda: runner.executor.beat.stats)
        runner.executor.report_to(metrics.step)
        self._capacity = runner.model_info.limits.max_batch_size + config.max_queue
        self._aside = ThreadPoolExecutor(4, thread_name_prefix="ingot aside")
        self._idle = asyncio.Event()
        self._idle.set()
        self.tracer = None if config.otlp_endpoint is None else Tracer(config.otlp_endpoint)
        self._ends: list[float] = []  # when sequences ended, the latest ones

    async def start(
        self, order: Order, prepare: Callable[[], list[TextRequest]], receive: Receive | None = None
    ) -> Generation:
        """Submit what `prepare` returns, as many sequences as ordered; it runs in a thread. Raises ApiError.

        receive: ASGI's, which tells when the client leaves. A generation that was ended meanwhile has no groups, and
        its events raise why.
        """
        self._admit(order)
        generation = Generation(order, EventQueue(self._bridge), self.metrics)
        self.sequences += order.count
        self.active[order.answer_id] = generation
        self._idle.clear()
        seconds = order.timeout or self.config.request_timeout
        stop = generation.queue.interrupt
        generation.deadline = asyncio.get_running_loop().call_later(seconds, stop, timed_out(seconds))
        if receive is not None:
            generation.watch = asyncio.create_task(generation.give_up_with(receive))
        pool = self._guided_pool if order.guided else self._pool
        generation.preparation = work = pool.run(lambda: self._submit(generation, prepare))
        await asyncio.wait((work, generation.queue.stopped), return_when=asyncio.FIRST_COMPLETED)
        if work.done() and (error := work.exception()) is not None:
            self._forget(generation)
            raise refused(error) if isinstance(error, IngotError) else error
        return generation

    def release(self, generation: Generation) -> None:
        """The answer is out, or nobody wants it: abort what still runs."""
        work = generation.preparation
        if work is not None and not work.done():
            work.add_done_callback(lambda _: self._give_up(generation, work))
            return
        self.texts.cancel([stream for group in generation.groups for stream in group])
        self._forget(generation)

    def discard(self, generation: Generation) -> None:
        """Let it run to its end; nobody wants the answer."""

        async def read() -> None:
            try:
                while not generation.finished:
                    await generation.events()
            except ApiError:
                pass
            finally:
                self.release(generation)

        task = asyncio.create_task(read())
        self._discarded.add(task)
        task.add_done_callback(self._discarded.discard)

    def cancel(self, request_id: str, key: int | None) -> bool:
        """End every request with this id, the answer's or the client's, that came with this key; False if there is
        none."""
        found = [
            each
            for each in self.active.values()
            if request_id in (each.answer_id, each.caller.request_id) and each.caller.key == key
        ]
        for generation in found:
            generation.queue.interrupt(cancelled())
        return bool(found)

    async def aside(self, work: Callable[[], Result]) -> Result:
        """What takes the longer the larger a body or an answer is, beside the event loop. Raises what `work` raises."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, work)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Tokenising and templates outside of requests: in the thread pool. Raises ApiError."""
        done = self._pool.run(work)
        if not (await asyncio.wait((done,), timeout=self.config.request_timeout))[0]:
            raise timed_out(self.config.request_timeout)
        try:
            return done.result()
        except IngotError as error:
            raise refused(error) from None

    async def drain(self) -> bool:
        """Take no more; wait for what runs, at most drain_timeout, then end it. Whether everything ended by itself."""
        self.draining = True
        return await self.is_idle(self.config.drain_timeout)

    async def is_idle(self, seconds: float) -> bool:
        """Whether everything that runs has its answer within this many seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds or 0.001)
        except asyncio.TimeoutError:
            return False
        return True

    def end_all(self, error: ApiError) -> None:
        """GeneratedResponse everything that runs with an error."""
        for generation in tuple(self.active.values()):
            generation.queue.interrupt(error)

    def close(self) -> None:
        """End the threads and release the engine; waits for the step that runs."""
        self.texts.close()
        self.runner.close()
        self._pool.close()
        self._guided_pool.close()
        self._aside.shutdown()
        if self.tracer is not None:
            self.tracer.close()

    def _wake(self) -> None:
        """On the text thread, when the events of a step are out."""
        self._bridge.wake()
        if self.texts.failure is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.failed.set)

    def _admit(self, order: Order) -> None:
        if self.draining:
            raise shutting_down(self.config.drain_timeout)
        timeout, count = order.timeout, order.count
        if timeout is not None and timeout > self.config.request_timeout:
            raise ApiError(
                400,
                f"timeout: at most {self.config.request_timeout:g} s; got {timeout:g}",
                param="timeout",
                code="invalid_value",
            )
        if count > self._capacity:
            raise ApiError(
                400,
                f"the request asks for {count} sequences ({order.prompts} prompts x n {order.n}), and the server "
                f"takes {self._capacity} at once",
                param="prompt" if order.prompts >= order.n else "n",
                code="invalid_value",
            )
        if self.sequences + count > self._capacity:
            raise ApiError(
                429,
                f"{self.sequences} sequences run or wait, and the server takes {self._capacity}",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(retry_after(self._ends, time.monotonic(), self._capacity))},
            )

    def _submit(self, generation: Generation, prepare: Callable[[], list[TextRequest]]) -> None:
        """On a thread of the pool. Nothing is done, or nothing more, for a client that has left."""
        groups: list[list[TextStream]] = []
        for index, asked in enumerate(() if generation.given_up else prepare()):
            if generation.given_up:
                break
            groups.append(make_streams(self.runner, self.tokenizer, index, asked))
        if generation.given_up:
            return
        check_logprobs(groups)
        streams = [stream for group in groups for stream in group]
        assert len(streams) == generation.count, "a request was admitted for other sequences than it asks for"
        generation.groups = groups
        self.texts.submit(streams, generation.queue.put)

    def _give_up(self, generation: Generation, work: "asyncio.Future[None]") -> None:
        """It is prepared at last, and its time is over."""
        if work.cancelled() or work.exception() is not None:
            self._forget(generation)
        else:
            self.release(generation)

    def _forget(self, generation: Generation) -> None:
        if self.active.pop(generation.answer_id, None) is None:
            return
        for timer in (generation.deadline, generation.watch):
            if timer is not None:
                timer.cancel()
        self.sequences -= generation.count
        self._ends = [*self._ends[-99:], *([time.monotonic()] * min(generation.count, 100))]
        if not self.active:
            self._idle.set()


def retry_after(ends: Sequence[float], now: float, capacity: int) -> int:
    """Whole seconds, 1 to 60, in which a tenth of what is in ends. ends: when the latest sequences did, in seconds."""
    if len(ends) < 2:
        return 1
    pace = (now - ends[0]) / len(ends)
    return min(max(1, math.ceil(pace * capacity / 10)), 60)
