"""Requests of HTTP on their way through the executor: who is in, who must wait outside, who is cancelled.

    start ──thread pool──▶ template, tokenizer, executor.add ──▶ Generation ──events──▶ the answer
                                                                   release: from any end, blocks come back

The event loop never waits for a step, a template or a tokenizer.
"""

import asyncio
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
from ingot.runtime.server.api_error import ApiError, cancelled, refused, shutting_down, timed_out
from ingot.runtime.server.generation import Generation, Order
from ingot.runtime.server.health import HealthMonitor, PrepareExecutor, Result, look_at
from ingot.runtime.server.kv_leases import Leases
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.nixl_blocks import Arena
from ingot.runtime.server.prefill_client import PrefillClient, Wanted, engine_digest
from ingot.runtime.server.request_log import RequestLog
from ingot.runtime.server.sampling_params import check_logprobs
from ingot.runtime.server.tracing import Tracer
from ingot.runtime.text_stream import TextRequest, TextStream, make_streams
from ingot.runtime.tokenizer import Tokenizer

_GUIDED_THREADS = 2


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
        self.health = HealthMonitor(self.texts, self._pool, config.stall_timeout)
        self.active: dict[str, Generation] = {}  # by answer_id
        self._discarded: set[asyncio.Task[None]] = set()
        self.draining = False
        self.sequences = 0  # in the executor, or on the way in or out
        metrics.watch(lambda: runner.executor.beat.stats)
        runner.executor.report_to(metrics.step)
        arena = Arena(config.lease_memory) if config.role == "prefill" and config.kv_transport == "nixl" else None
        self.leases = Leases(most_bytes=config.lease_memory, seconds=config.lease_timeout, arena=arena)
        self.prefill: PrefillClient | None = None
        if config.role == "decode":
            digest = engine_digest(runner.engine)
            self.prefill = PrefillClient(runner.block_transfer(), digest, config, metrics)
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
        if self.prefill is None:
            work = pool.run(lambda: self._submit(generation, self._streams(generation, prepare)[0]))
        else:
            work = asyncio.ensure_future(self._fetch_and_submit(generation, prepare, pool, self.prefill))
            work.add_done_callback(look_at)
        generation.preparation = work
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
        self.leases.close()
        if self.prefill is not None:
            self.prefill.close()
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

    def _streams(
        self, generation: Generation, prepare: Callable[[], list[TextRequest]]
    ) -> tuple[list[list[TextStream]], list[str]]:
        """The sequences of each prompt, and its salt. On a thread of the pool. Nothing is done, or nothing more, for a
        client that has left."""
        groups: list[list[TextStream]] = []
        salts: list[str] = []
        for index, asked in enumerate(() if generation.given_up else prepare()):
            if generation.given_up:
                break
            groups.append(make_streams(self.runner, self.tokenizer, index, asked))
            salts.append(asked.cache_salt)
        check_logprobs(groups)
        return groups, salts

    def _submit(self, generation: Generation, groups: list[list[TextStream]]) -> None:
        """On a thread of the pool."""
        if generation.given_up:
            return
        streams = [stream for group in groups for stream in group]
        assert len(streams) == generation.count, "a request was admitted for other sequences than it asks for"
        generation.groups = groups
        self.texts.submit(streams, generation.queue.put)

    async def _fetch_and_submit(
        self,
        generation: Generation,
        prepare: Callable[[], list[TextRequest]],
        pool: PrepareExecutor,
        prefill: PrefillClient,
    ) -> None:
        """Where other servers compute prompts."""
        groups, salts = await pool.run(lambda: self._streams(generation, prepare))
        firsts = (group[0].request for group in groups)
        wanted = [Wanted(request=request, cache_salt=salt) for request, salt in zip(firsts, salts, strict=True)]
        await prefill.fetch(wanted, generation.queue.stopped)
        await pool.run(lambda: self._submit(generation, groups))

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
