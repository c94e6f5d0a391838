"""The routes: OpenAI's, tokens, health, metrics. Each handler reads a body, asks the service, and answers."""

import base64
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ingot import __version__
from ingot.errors import RequestError
from ingot.runtime.answers.tool_rules import with_tools
from ingot.runtime.answers.tools import ToolUse
from ingot.runtime.server.api_error import ApiError, not_ready, refused
from ingot.runtime.server.body import AnyBody, read_body
from ingot.runtime.server.chat_format import ChatChunkBuilder
from ingot.runtime.server.debug import stalling_request
from ingot.runtime.server.health import Result
from ingot.runtime.server.ids import Ids
from ingot.runtime.server.json_pieces import json_blocks
from ingot.runtime.server.middleware import limited_body
from ingot.runtime.server.openai_format import CompletionChunkBuilder, Echo, Json, ResponseHead
from ingot.runtime.server.openapi import document
from ingot.runtime.server.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generate,
    StallRequest,
    TokenizeRequest,
)
from ingot.runtime.server.response import GeneratedResponse
from ingot.runtime.server.sampling_params import (
    chat_params,
    chat_prompt,
    completion_params,
    most_tokens,
    template_arguments,
    text_requests,
    tool_use,
)
from ingot.runtime.server.service import Generation, Order, Service
from ingot.runtime.text_stream import TextRequest
from ingot.runtime.validation import read_ids

_SMALL = 8 << 10  # bytes of a body
_PAGE = Path(__file__).with_name("page.html")


class Api:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service, self._config, self._ids = service, service.config, Ids()
        engine = service.runner.engine
        self._names = self._config.model_names or (engine.directory.resolve().name,)
        # read now: the directory may be moved or deleted while the engine is served
        self._created = int((engine.directory / "config.json").stat().st_mtime)
        digest = hashlib.sha256(engine.manifest.to_json().encode()).hexdigest()
        self._fingerprint = f"ingot-{__version__}-{digest[:12]}"
        self._page = _PAGE.read_bytes()
        self._page_headers = {"content-security-policy": _policy(self._page), "x-content-type-options": "nosniff"}
        self._document = document(debug_hooks=self._config.debug_hooks)

    def routes(self) -> list[Route]:
        """Path → handler."""
        table: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/v1/requests/{request_id}/cancel", self.cancel),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/metrics", self.metrics),
            ("GET", "/health", self.ready),
            ("GET", "/health/live", self.live),
            ("GET", "/health/ready", self.ready),
            ("GET", "/version", self.version),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/", self.page),
        ]
        if self._config.debug_hooks:
            table.append(("POST", "/debug/stall", self.stall))
        return [Route(path, handler, methods=[method]) for method, path, handler in table]

    async def chat(self, request: Request) -> GeneratedResponse:
        """POST /v1/chat/completions."""
        defaults = self._service.defaults
        asked, params, use = await self._read(
            request, ChatRequest, lambda asked: (asked, chat_params(asked, defaults), tool_use(asked))
        )

        def prepare() -> list[TextRequest]:
            formats, guides = self._service.formats, self._service.runner.guides
            ids = self._chat_ids(asked, asked.messages, use)
            return text_requests(asked, [ids], with_tools(params, use, formats, guides), formats.reading(use))

        generation = await self._start(request, asked, "chatcmpl", 1, prepare)
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
        )
        return GeneratedResponse(
            self._service,
            generation,
            writer,
            route="/v1/chat/completions",
            n=asked.n,
            stream=asked.stream,
            with_usage=with_usage,
            model=self._names[0],
        )

    async def completions(self, request: Request) -> GeneratedResponse:
        """POST /v1/completions."""
        defaults = self._service.defaults
        asked, params = await self._read(
            request, CompletionRequest, lambda asked: (asked, completion_params(asked, defaults))
        )
        prompts = asked.prompts()
        generation = await self._start(
            request, asked, "cmpl", len(prompts), lambda: text_requests(asked, prompts, params)
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
        )
        return GeneratedResponse(
            self._service,
            generation,
            writer,
            route="/v1/completions",
            n=asked.n,
            stream=asked.stream,
            with_usage=with_usage,
            model=self._names[0],
        )

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        name = request.path_params["model"]
        self._check_model(name)
        return JSONResponse(self._model(name))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/requests/{id}/cancel: the id of an answer, or the X-Request-Id of a request; of the same key."""
        request_id = request.path_params["request_id"]
        if not self._service.cancel(request_id, request.state.caller.key):
            raise ApiError(404, f"no request with the id {request_id!r} is running", code="request_not_found")
        return JSONResponse({"id": request_id, "cancelled": True})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        asked, use = await self._read(request, TokenizeRequest, lambda asked: (asked, tool_use(asked)))
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
        tokenizer = self._service.tokenizer

        def work() -> Response:
            if asked.messages is not None:
                ids = self._chat_ids(asked, asked.messages, use)
            else:
                ids = tokenizer.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens)
            limit = self._service.runner.facts.limits.max_seq_len
            texts = [tokenizer.token_text(token) for token in ids] if asked.return_token_strs else None
            return _written({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

        return await self._service.run(work)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        asked = await self._read(request, DetokenizeRequest, lambda asked: asked)

        def work() -> Response:
            if not asked.tokens:
                return _written({"prompt": ""})
            ids = read_ids(asked.tokens, self._service.runner.facts.vocab_size, "tokens")
            return _written({"prompt": self._service.tokenizer.decode(ids.tolist(), skip_special_tokens=False)})

        return await self._service.run(work)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def live(self, request: Request) -> Response:
        """GET /health/live: this loop turns. A server that drains, or whose steps stall, lives."""
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """GET /health/ready: tokens flow, and new requests are welcome."""
        reason = self._why_not()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503, {"retry-after": "5"})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        manifest = self._service.runner.engine.manifest
        return JSONResponse(
            {
                "version": __version__,
                "engine": {
                    "target": manifest.target,
                    "precision": manifest.precision,
                    "built_with": manifest.ingot_version,
                    **manifest.model,
                },
                "tool_parser": self._service.formats.names[0],
                "reasoning_parser": self._service.formats.names[1],
            }
        )

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(self._document)

    async def page(self, request: Request) -> Response:
        """GET /: chat with the engine in a browser."""
        return Response(self._page, media_type="text/html; charset=utf-8", headers=self._page_headers)

    async def stall(self, request: Request) -> Response:
        """POST /debug/stall: the next step takes so long. Only with --debug_hooks."""
        asked = await self._read(request, StallRequest, lambda asked: asked)
        vocab = self._service.runner.facts.vocab_size
        generation = await self._service.start(
            Order(answer_id=f"stall-{self._ids.make()}", caller=request.state.caller),
            lambda: [stalling_request(vocab, asked.seconds)],
        )
        self._service.discard(generation)
        return JSONResponse({"stalling": asked.seconds}, 202)

    def _why_not(self) -> str | None:
        if self._service.texts.failure is not None:
            return self._service.texts.failure
        return "the server is shutting down" if self._service.draining else self._service.pulse.stalled()

    async def _read(self, request: Request, kind: type[AnyBody], use: Callable[[AnyBody], Result]) -> Result:
        """What `use` makes of a body: of small ones at once, of others beside the event loop."""
        data = await limited_body(request, self._config.max_body_bytes, self._config.body_timeout)

        def work() -> Result:
            asked = read_body(kind, data)
            if asked.model is not None:
                self._check_model(asked.model)
            try:
                return use(asked)
            except RequestError as error:
                raise refused(error) from None

        return work() if len(data) <= _SMALL else await self._service.aside(work)

    async def _start(
        self, request: Request, asked: Generate, prefix: str, prompts: int, prepare: Callable[[], list[TextRequest]]
    ) -> Generation:
        if self._service.texts.failure is not None:
            raise not_ready(str(self._why_not()))
        if asked.stream_options is not None and not asked.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
        order = Order(
            answer_id=f"{prefix}-{self._ids.make()}",
            caller=request.state.caller,
            prompts=prompts,
            n=asked.n,
            timeout=asked.timeout,
            prompt_alone=most_tokens(asked) == 0,
        )
        return await self._service.start(order, prepare, request.receive)

    def _chat_ids(
        self, asked: ChatRequest | TokenizeRequest, messages: Sequence[ChatMessage], use: ToolUse
    ) -> list[int]:
        """The prompt of a conversation."""
        return chat_prompt(
            messages,
            self._service.templates,
            self._service.tokenizer,
            add_generation_prompt=asked.add_generation_prompt,
            arguments=template_arguments(asked, self._service.templates),
            special_tokens_in_content=self._config.special_tokens_in_content,
            tools=use.specs(),
        )

    def _echoes(
        self, asked: CompletionRequest, prompts: Sequence[str | list[int]], generation: Generation
    ) -> list[Echo]:
        if not asked.echo or not generation.groups:
            return []
        decode = self._service.tokenizer.decode
        found = []
        for prompt, group in zip(prompts, generation.groups, strict=True):
            ids = group[0].request.tokens[: group[0].request.num_prompt].tolist()
            text = prompt if isinstance(prompt, str) else decode(ids, skip_special_tokens=asked.skip_special_tokens)
            found.append(Echo(text=text, token_ids=ids))
        return found

    def _head(self, generation: Generation) -> ResponseHead:
        return ResponseHead(
            answer_id=generation.answer_id,
            created=generation.created,
            model=self._names[0],
            fingerprint=self._fingerprint,
        )

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; here is {', '.join(self._names)}",
                param="model",
                code="model_not_found",
            )

    def _model(self, name: str) -> Json:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "ingot"}


def _policy(page: bytes) -> str:
    """Only the page's own script runs, and it talks to this server only."""
    script = page.split(b"<script>")[1].split(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _written(document: Json) -> Response:
    """For threads beside the event loop."""
    return Response(b"".join(json_blocks(document)), media_type="application/json")
