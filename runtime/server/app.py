"""The routes: OpenAI's, tokens, health, metrics. Each handler reads a body, asks the service, and answers."""

import base64
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ingot import __version__
from ingot.runtime.server.api_base import written
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.debug import stalling_request
from ingot.runtime.server.events_api import EventsApi
from ingot.runtime.server.generating_api import GeneratingApi
from ingot.runtime.server.generation import Order
from ingot.runtime.server.openai_format import Json
from ingot.runtime.server.openapi import document
from ingot.runtime.server.prefill_api import PrefillApi
from ingot.runtime.server.protocol import DetokenizeRequest, StallRequest, TokenizeRequest
from ingot.runtime.server.sampling_params import tool_use
from ingot.runtime.server.service import Service
from ingot.runtime.validation import read_ids

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_PAGE = Path(__file__).with_name("page.html")


class Api(GeneratingApi):
    """The handlers."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        # read now: the directory may be moved or deleted while the engine is served
        self._created = int((service.runner.engine.directory / "config.json").stat().st_mtime)
        self._page = _PAGE.read_bytes()
        self._page_headers = {"content-security-policy": _policy(self._page), "x-content-type-options": "nosniff"}
        self._prefill = None if self._config.role != "prefill" else PrefillApi(service)
        self._events = EventsApi(service)
        self._document = document(debug_hooks=self._config.debug_hooks, prefill=self._prefill is not None)

    def routes(self) -> list[Route]:
        """Path → handler."""
        table: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/responses", self.responses),
            ("POST", "/v1/messages", self.messages),
            ("POST", "/v1/messages/count_tokens", self.count_tokens),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/v1/requests/{request_id}/cancel", self.cancel),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/kv/events", self._events.events),
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
        if self._prefill is not None:
            table = [
                (how, path, self._prefill.refuse if path in _GENERATING else answer) for how, path, answer in table
            ]
            table += self._prefill.routes()
        return [Route(path, handler, methods=[method]) for method, path, handler in table]

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names if "*" not in name]})

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
            limit = self._service.runner.model_info.limits.max_seq_len
            texts = [tokenizer.token_text(token) for token in ids] if asked.return_token_strs else None
            return written({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

        return await self._service.run(work)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        asked = await self._read(request, DetokenizeRequest, lambda asked: asked)

        def work() -> Response:
            if not asked.tokens:
                return written({"prompt": ""})
            ids = read_ids(asked.tokens, self._service.runner.model_info.vocab_size, "tokens")
            return written({"prompt": self._service.tokenizer.decode(ids.tolist(), skip_special_tokens=False)})

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
        vocab = self._service.runner.model_info.vocab_size
        generation = await self._service.start(
            Order(answer_id=f"stall-{self._ids.make()}", caller=request.state.caller),
            lambda: [stalling_request(vocab, asked.seconds)],
        )
        self._service.discard(generation)
        return JSONResponse({"stalling": asked.seconds}, 202)

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
