"""`EngineLLM`: text or token ids in, text out, with vLLM's names, for many prompts at once or one as it grows."""

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType

from ingot.configs.sampling import SamplingParams
from ingot.errors import IngotError, RequestError
from ingot.runtime.answers.answer_formats import AnswerFormats
from ingot.runtime.answers.tool_rules import with_tools
from ingot.runtime.answers.tools import read_tools
from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.detokenizer_thread import DetokenizerThread
from ingot.runtime.event_queue import EventQueue, LoopBridges
from ingot.runtime.generate_text import read_text
from ingot.runtime.llm_chat import ChatTokenizer, Message, read_conversations, read_template_arguments
from ingot.runtime.llm_outputs import OutputAccumulator, RequestOutput
from ingot.runtime.llm_progress import show_progress
from ingot.runtime.llm_prompts import (
    Prompt,
    check_params,
    check_use_tqdm,
    params_for,
    read_request,
    read_requests,
    refuse_arguments,
)
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Outlet
from ingot.runtime.owned import Owned
from ingot.runtime.reports import Stats
from ingot.runtime.template_text import plain
from ingot.runtime.text_stream import TextRequest, TextStream, make_streams
from ingot.runtime.tokenizer import Tokenizer


class EngineLLM(Owned):
    """An engine with its tokenizer. Thread-safe; `ingot.LLM` also takes Hugging Face directories.

    runner     what it runs on: stats(), step_log()
    tokenizer  of the engine
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """tool_parser, reasoning_parser: as in `ServeConfig`. `check_formats` has read them."""
        super().__init__()
        self.runner, self.tokenizer = runner, tokenizer
        self._parsers = tool_parser, reasoning_parser
        self._bridges = LoopBridges()
        self._texts = DetokenizerThread(runner, tokenizer, on_pause=self._bridges.wake)
        self._templates: dict[str | None, ChatTokenizer] = {}
        self._closing = weakref.finalize(self, _close, self._texts, runner)  # before the interpreter ends, too

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Complete every prompt: a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; one result per
        prompt, in their order.

        sampling_params   for all prompts, or one for each; SamplingParams() unless given
        prompt_token_ids  in place of prompts: the token ids of one, or of several
        use_tqdm          a progress bar on stderr; None: on a terminal, for more than one prompt

        Raises RequestError before anything runs if any prompt or argument is wrong, and if a request fails.
        """
        refuse_arguments(EngineLLM.generate, others)
        return self._run(read_requests(prompts, sampling_params, prompt_token_ids), use_tqdm)

    def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **others: object
    ) -> "AsyncOutputs":
        """Yields the result so far, again and again until it is finished. Raises RequestError as `generate`.

            async for r in llm.generate_async("Once", SamplingParams(max_tokens=64)): ...

        Leaving the loop, cancelling its task or aclose() aborts the request; its blocks are free after the step that
        runs.
        """
        refuse_arguments(EngineLLM.generate_async, others)
        params = SamplingParams() if sampling_params is None else check_params(sampling_params)
        return AsyncOutputs(self, self._texts, self._bridges, read_request(prompt, params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: object = None,
        parallel_tool_calls: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **others: object,
    ) -> list[RequestOutput]:
        """Answer a conversation, a list of {"role": ..., "content": ...}, or every one of a list of conversations.

        tools, tool_choice, parallel_tool_calls  as OpenAI's API has them; calls are in `outputs[n].tool_calls`
        chat_template         a jinja2 file, or "chatml"; None: the engine's, or chatml where it has none
        continue_final_message  go on from the last message, the assistant's; with add_generation_prompt=False
        chat_template_kwargs  further variables of the template, e.g. {"enable_thinking": False}
        others                as in `generate`

        Returns one result per conversation, in their order. Raises RequestError before anything runs if a message or
        an argument is wrong or the template refuses it, and if a request fails.
        """
        refuse_arguments(EngineLLM.chat, others)
        tokenizer = self.get_tokenizer(chat_template)
        use = read_tools(tools, tool_choice, parallel_tool_calls)
        if use.tools:
            tokenizer.require_tools()
        texts = [
            tokenizer.render(
                each,
                use.specs(),
                add_generation_prompt,
                read_template_arguments(chat_template_kwargs),
                continue_final_message,
            )
            for each in read_conversations(messages)
        ]
        asked = [
            TextRequest(
                prompt=tokenizer.encode_rendered(text),
                params=with_tools(params, use, tokenizer.formats, self.runner.guides),
                shown=plain(text),
                reading=tokenizer.formats.reading(use),
            )
            for text, params in zip(texts, params_for(len(texts), sampling_params), strict=True)
        ]
        return self._run(asked, use_tqdm)

    def get_tokenizer(self, chat_template: str | None = None) -> ChatTokenizer:
        """The engine's: encode, decode, apply_chat_template. chat_template: as in `chat`."""
        if isinstance(chat_template, str) and ("{{" in chat_template or "{%" in chat_template):
            raise RequestError(
                "chat_template must be a file",
                expected='the path of a jinja2 file, or "chatml"',
                got=chat_template[:100],
                hint="write the template to a file",
            )
        found = self._templates.get(chat_template)
        if found is None:
            templates = ChatTemplates.from_dir(self.runner.engine.directory, chat_template)
            formats = AnswerFormats.find(templates.texts.values(), self.tokenizer, *self._parsers)
            found = ChatTokenizer(self.tokenizer, templates, formats)
            self._templates[chat_template] = found
        return found

    def stats(self) -> Stats:
        """See ModelRunner.stats."""
        return self.runner.stats()

    def close(self) -> None:
        """Fail what runs and release the engine. Closing twice is fine."""
        if not self.is_here:
            return
        self.runner.executor.require_ready()
        _close(self._texts, self.runner)
        self._closing.detach()

    def _run(self, asked: Sequence[TextRequest], use_tqdm: bool | None) -> list[RequestOutput]:
        check_use_tqdm(use_tqdm)
        groups = [make_streams(self.runner, self.tokenizer, index, each) for index, each in enumerate(asked)]
        accumulators = [OutputAccumulator(each, group) for each, group in zip(asked, groups, strict=True)]
        streams = [stream for group in groups for stream in group]
        requests, outlet = [stream.request for stream in streams], Outlet()
        self.runner.executor.require_ready()
        try:
            self.runner.executor.add(requests, outlet)
            with show_progress(use_tqdm, len(accumulators)) as advance:
                for event in read_text(self.runner, streams, outlet):
                    if event.error is not None:
                        raise event.error
                    accumulators[event.index].add(event)
                    if accumulators[event.index].finished:
                        advance()
        finally:
            self.runner.executor.abort(requests)
        return [accumulator.output() for accumulator in accumulators]

    def __enter__(self) -> "EngineLLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncOutputs(Owned):
    """Asynchronous iterator over the growing result of one prompt. The request begins with the first `anext`."""

    def __init__(self, llm: EngineLLM, texts: DetokenizerThread, bridges: LoopBridges, asked: TextRequest) -> None:
        """llm: kept, so that it stays open."""
        super().__init__()
        self._llm, self._texts, self._bridges, self._asked = llm, texts, bridges, asked
        self._streams: list[TextStream] = []
        self._accumulator: OutputAccumulator | None = None
        self._failure: IngotError | None = None
        self._events: EventQueue | None = None

    def __aiter__(self) -> "AsyncOutputs":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._accumulator is None or self._events is None:
            self._accumulator, self._events = self._begin()
        if self._failure is not None:
            self._stop()
            failure, self._failure = self._failure, None
            raise failure
        if self._accumulator.finished:
            raise StopAsyncIteration
        try:
            events = [event for _, event in await self._events.drain()]
        except BaseException:
            self._stop()
            raise
        for event in events:
            self._failure = self._failure or event.error
            self._accumulator.add(event)
        if not any(event.token_ids for event in events) and self._failure is not None:
            return await self.__anext__()
        return self._accumulator.output()

    async def aclose(self) -> None:
        """Abort the request, if it still runs, and end the iteration."""
        self._failure = None
        self._stop()

    def __del__(self) -> None:
        self._stop()

    def _begin(self) -> tuple[OutputAccumulator, EventQueue]:
        self._streams = make_streams(self._texts.runner, self._texts.tokenizer, 0, self._asked)
        accumulator, events = OutputAccumulator(self._asked, self._streams), EventQueue(self._bridges.here())
        self._texts.submit(self._streams, events.put)
        return accumulator, events

    def _stop(self) -> None:
        if self._accumulator is not None and not self._accumulator.finished:
            self._accumulator.finished = True
            self._texts.cancel(self._streams)


def _close(texts: DetokenizerThread, runner: ModelRunner) -> None:
    """What was computed until then is told before anything fails."""
    runner.executor.close()
    texts.close()
    runner.close()
