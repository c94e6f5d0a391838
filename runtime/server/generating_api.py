"""The handlers that generate: OpenAI's completions, chats and responses, and Anthropic's messages."""

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from ingot.configs.sampling import SamplingParams
from ingot.runtime.answers.tool_rules import with_tools
from ingot.runtime.answers.tools import ToolUse
from ingot.runtime.fill_in_middle import fill_prompt
from ingot.runtime.server.api_base import ApiBase, written
from ingot.runtime.server.api_error import said_as
from ingot.runtime.server.chat_format import ChatChunkBuilder
from ingot.runtime.server.generation import Generation
from ingot.runtime.server.messages_format import MessagesChunkBuilder
from ingot.runtime.server.messages_protocol import NAMES_OF_MESSAGES, CountTokensRequest, MessagesRequest
from ingot.runtime.server.openai_format import ChunkBuilder, CompletionChunkBuilder, Echo, Extras
from ingot.runtime.server.other_tools import skipped_header
from ingot.runtime.server.protocol import ChatMessage, ChatRequest, CompletionRequest, Generate, TokenizeRequest
from ingot.runtime.server.response import NO_HEADERS, GeneratedResponse
from ingot.runtime.server.responses_format import ResponsesChunkBuilder
from ingot.runtime.server.responses_protocol import NAMES_OF_RESPONSES, ResponsesRequest
from ingot.runtime.server.sampling_params import (
    chat_params,
    chat_prompt,
    completion_params,
    template_arguments,
    text_requests,
    tool_use,
)
from ingot.runtime.text_stream import TextRequest


class GeneratingApi(ApiBase):
    """See above. Messages and responses are read as chats, and written in their own form."""

    async def chat(self, request: Request) -> GeneratedResponse:
        """POST /v1/chat/completions."""
        defaults = self._service.defaults
        asked, params, use = await self._read(
            request, ChatRequest, lambda asked: (asked, chat_params(asked, defaults), tool_use(asked))
        )

        generation = await self._start_chat(request, asked, params, use, "chatcmpl")
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        writer = ChatChunkBuilder(
            self._head(generation),
            self._service.tokenizer,
            asked.n,
            params.logprobs,
            with_usage=with_usage,
            prompt_alone=generation.prompt_alone,
            with_reasoning=asked.include_reasoning,
            named=use.named,
            extras=self._extras(asked, generation, _last_text(asked) if asked.echo else ""),
        )
        return self._answer(generation, writer, "/v1/chat/completions", stream=asked.stream, n=asked.n)

    async def completions(self, request: Request) -> GeneratedResponse:
        """POST /v1/completions."""
        defaults = self._service.defaults
        asked, params = await self._read(
            request, CompletionRequest, lambda asked: (asked, completion_params(asked, defaults))
        )
        prompts = asked.prompts()
        generation = await self._start(
            request,
            asked,
            "cmpl",
            len(prompts),
            lambda: text_requests(asked, self._filled(asked, prompts), params),
            guided=params.structured_outputs is not None,
        )
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        echoes = await self._service.aside(lambda: self._echoes(asked, prompts, generation))
        writer = CompletionChunkBuilder(
            self._head(generation),
            self._service.tokenizer,
            generation.count,
            n=asked.n,
            logprobs=params.logprobs is not None,
            skip_special_tokens=asked.skip_special_tokens,
            with_usage=with_usage,
            echoes=echoes,
            prompt_alone=generation.prompt_alone,
            extras=self._extras(asked, generation),
        )
        return self._answer(generation, writer, "/v1/completions", stream=asked.stream, n=asked.n)

    async def messages(self, request: Request) -> GeneratedResponse:
        """POST /v1/messages."""
        defaults, variables = self._service.defaults, self._service.templates.variables
        reasons = self._service.formats.reasoning is not None

        def use_of(given: MessagesRequest) -> tuple[MessagesRequest, ChatRequest, SamplingParams, ToolUse]:
            asked = given.as_chat(variables, reasons=reasons, skip_tools=self._config.skip_unsupported_tools)
            return given, asked, chat_params(asked, defaults), tool_use(asked)

        with said_as(NAMES_OF_MESSAGES):
            given, asked, params, use = await self._read(request, MessagesRequest, use_of)
            generation = await self._start_chat(request, asked, params, use, "msg")
        writer = MessagesChunkBuilder(self._head(generation), with_reasoning=asked.include_reasoning)
        headers = skipped_header(given.tools)
        return self._answer(generation, writer, "/v1/messages", stream=given.stream, headers=headers)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        variables, reasons = self._service.templates.variables, self._service.formats.reasoning is not None

        def use_of(given: CountTokensRequest) -> tuple[ChatRequest, ToolUse]:
            asked = given.as_chat(variables, reasons=reasons, skip_tools=self._config.skip_unsupported_tools)
            return asked, tool_use(asked)

        with said_as(NAMES_OF_MESSAGES):
            asked, use = await self._read(request, CountTokensRequest, use_of)
            return await self._service.run(
                lambda: written({"input_tokens": len(self._chat_ids(asked, asked.messages, use))})
            )

    async def responses(self, request: Request) -> GeneratedResponse:
        """POST /v1/responses."""
        defaults = self._service.defaults

        def use_of(given: ResponsesRequest) -> tuple[ResponsesRequest, ChatRequest, SamplingParams, ToolUse]:
            asked = given.as_chat(skip_tools=self._config.skip_unsupported_tools)
            return given, asked, chat_params(asked, defaults), tool_use(asked)

        with said_as(NAMES_OF_RESPONSES):
            given, asked, params, use = await self._read(request, ResponsesRequest, use_of)
            generation = await self._start_chat(request, asked, params, use, "resp")
        writer = ResponsesChunkBuilder(self._head(generation), given.echoed(params.temperature, params.top_p))
        headers = skipped_header(given.tools)
        return self._answer(generation, writer, "/v1/responses", stream=given.stream, headers=headers)

    async def _start_chat(
        self, request: Request, asked: ChatRequest, params: SamplingParams, use: ToolUse, prefix: str
    ) -> Generation:
        def prepare() -> list[TextRequest]:
            formats, guides = self._service.formats, self._service.runner.guides
            ids = self._chat_ids(asked, asked.messages, use)
            return text_requests(asked, [ids], with_tools(params, use, formats, guides), formats.reading(use))

        guided = use.constrained or params.structured_outputs is not None
        return await self._start(request, asked, prefix, 1, prepare, guided=guided)

    def _answer(
        self,
        generation: Generation,
        writer: ChunkBuilder,
        route: str,
        *,
        stream: bool,
        n: int = 1,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> GeneratedResponse:
        return GeneratedResponse(
            self._service, generation, writer, route=route, n=n, stream=stream, model=self._names[0], headers=headers
        )

    def _chat_ids(
        self, asked: ChatRequest | TokenizeRequest, messages: Sequence[ChatMessage], use: ToolUse
    ) -> list[int]:
        """The prompt of a conversation."""
        return chat_prompt(
            messages,
            self._service.templates,
            self._service.tokenizer,
            add_generation_prompt=asked.add_generation_prompt,
            arguments=template_arguments(
                asked, self._service.templates, reasons=self._service.formats.reasoning is not None
            ),
            special_tokens_in_content=self._config.special_tokens_in_content,
            continue_final_message=asked.continue_final_message,
            tools=use.specs(),
        )

    def _filled(self, asked: CompletionRequest, prompts: Sequence[str | list[int]]) -> Sequence[str | list[int]]:
        """The prompts, with what stands behind the gap that is to be filled."""
        if asked.suffix is None:
            return prompts
        tokens = self._service.tokenizer.control_tokens
        return [fill_prompt(str(each), asked.suffix, tokens) for each in prompts]

    def _extras(self, asked: Generate, generation: Generation, echo: str = "") -> Extras:
        ids = None
        if asked.return_token_ids:
            firsts = [group[0].request for group in generation.groups]
            ids = [each.tokens[: each.num_prompt].tolist() for each in firsts]
        return Extras(prompt_token_ids=ids, prompt_logprobs=asked.prompt_logprobs is not None, echo=echo)

    def _echoes(
        self, asked: CompletionRequest, prompts: Sequence[str | list[int]], generation: Generation
    ) -> list[Echo]:
        if not asked.echo or not generation.groups:
            return []
        decode = self._service.tokenizer.decode
        found = []
        for prompt, group in zip(prompts, generation.groups, strict=True):
            ids = group[0].request.tokens[: group[0].request.num_prompt].tolist()
            whole = isinstance(prompt, str) and asked.truncate_prompt_tokens is None
            text = str(prompt) if whole else decode(ids, skip_special_tokens=asked.skip_special_tokens)
            found.append(Echo(text=text, token_ids=ids))
        return found


def _last_text(asked: ChatRequest) -> str:
    """What the answer goes on from: the assistant's last message."""
    last = asked.messages[-1]
    return str(last.for_template().get("content") or "") if last.role == "assistant" else ""
