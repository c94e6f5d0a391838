"""`EngineLLM`: text or token ids in, text out, with vLLM's names, for many prompts at once or one as it grows."""

import asyncio
import numbers
import queue
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.executor import Stats
from ingot.runtime.llm_outputs import Gathering, RequestOutput
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.text_loop import TextLoop
from ingot.runtime.text_stream import TextEvent, TextRequest, TextStream, make_streams
from ingot.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class EngineLLM:
    """An engine with its tokenizer. Thread-safe; `ingot.LLM` also takes Hugging Face directories.

    runner     what it runs on: stats(), step_log()
    tokenizer  of the engine
    """

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self._texts = TextLoop(runner, tokenizer)
        self._closing = weakref.finalize(self, _close, self._texts, runner)  # before the interpreter ends, too

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, a text or a list of token ids; one result per prompt, in their order.

        sampling_params  for all prompts, or one for each; SamplingParams() unless given
        Raises RequestError before anything runs if any prompt or parameter is wrong, and if a request fails.
        """
        asked = _read(prompts, sampling_params)
        groups = [make_streams(self.runner, self.tokenizer, index, each) for index, each in enumerate(asked)]
        gatherings = [Gathering(each, group) for each, group in zip(asked, groups, strict=True)]
        streams = [stream for group in groups for stream in group]
        events: queue.SimpleQueue[TextEvent] = queue.SimpleQueue()
        try:
            self._texts.submit(streams, events.put)
            while not all(gathering.finished for gathering in gatherings):
                event = events.get()
                if event.error is not None:
                    raise event.error
                gatherings[event.index].take(event)
        finally:
            self._texts.cancel(streams)
        return [gathering.output() for gathering in gatherings]

    def generate_async(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> "AsyncOutputs":
        """The result so far, again and again until it is finished.

            async for r in llm.generate_async("Once", SamplingParams(max_tokens=64)): ...

        Leaving the loop, cancelling its task or aclose() aborts the request; its blocks are free at once.
        """
        return AsyncOutputs(
            self._texts,
            TextRequest(
                prompt=prompt, params=SamplingParams() if sampling_params is None else _params(sampling_params)
            ),
        )

    def stats(self) -> Stats:
        """See ModelRunner.stats."""
        return self.runner.stats()

    def close(self) -> None:
        """Abort what runs and release the engine. Closing twice is fine."""
        self._closing()

    def __enter__(self) -> "EngineLLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncOutputs:
    """Asynchronous iterator over the growing result of one prompt. The request begins with the first `anext`."""

    def __init__(self, texts: TextLoop, asked: TextRequest) -> None:
        self._texts, self._asked = texts, asked
        self._streams: list[TextStream] = []
        self._gathering: Gathering | None = None
        self._events: asyncio.Queue[TextEvent] = asyncio.Queue()

    def __aiter__(self) -> "AsyncOutputs":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._gathering is None:
            self._gathering = self._begin()
        if self._gathering.finished:
            raise StopAsyncIteration
        try:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            for event in events:
                if event.error is not None:
                    raise event.error
                self._gathering.take(event)
        except BaseException:
            self._stop()
            raise
        return self._gathering.output()

    async def aclose(self) -> None:
        """Abort the request, if it still runs, and end the iteration."""
        self._stop()

    def __del__(self) -> None:
        self._stop()

    def _begin(self) -> Gathering:
        self._streams = make_streams(self._texts.runner, self._texts.tokenizer, 0, self._asked)
        gathering = Gathering(self._asked, self._streams)
        loop, events = asyncio.get_running_loop(), self._events

        def sink(event: TextEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._texts.submit(self._streams, sink)
        return gathering

    def _stop(self) -> None:
        if self._gathering is not None and not self._gathering.finished:
            self._gathering.finished = True
            self._texts.cancel(self._streams)


def _close(texts: TextLoop, runner: ModelRunner) -> None:
    texts.close()
    runner.close()


def _read(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[TextRequest]:
    each = (
        [prompts] if isinstance(prompts, str) else _listed("prompts", prompts, "a text, token ids, or a list of these")
    )
    if each and all(isinstance(item, numbers.Integral) for item in each):  # the token ids of one prompt
        each = [each]
    if params is None or isinstance(params, SamplingParams):
        chosen = [params or SamplingParams()] * len(each)
    else:
        chosen = _listed("sampling_params", params, "SamplingParams, or a list of them")
    if len(chosen) != len(each):
        raise RequestError(
            "sampling_params must be one for all prompts, or one for each", expected=str(len(each)),
            got=str(len(chosen)),
        )  # fmt: skip
    return [TextRequest(prompt=prompt, params=_params(one)) for prompt, one in zip(each, chosen, strict=True)]


def _listed(name: str, value: object, expected: str) -> list[Any]:
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise RequestError(f"{name} cannot be read", expected=expected, got=repr(value)[:100])
    return list(value)


def _params(value: object) -> SamplingParams:
    if not isinstance(value, SamplingParams):
        raise RequestError("sampling_params must be SamplingParams", got=repr(value)[:100])
    return value
