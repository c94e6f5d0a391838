"""What every request passes before its handler: request id, API key; and how bodies are read within limits."""

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.runtime.server.api_error import ApiError, ClientGoneError

_OPEN = ("/health", "/version", "/metrics", "/openapi.json")  # and "/", without a key
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Guard:
    """ASGI middleware. Gives each request an id, the client's X-Request-Id or its own, and asks for a key."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._hashes = [_hash(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if self._hashes and not self._is_open(scope) and not self._knows(headers.get("authorization", "")):
            error = ApiError(
                401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
            await JSONResponse(error.body(), 401, error.headers)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _knows(self, authorization: str) -> bool:
        """Compares with every key in constant time."""
        scheme, _, key = authorization.partition(" ")
        hashed = _hash(key.strip())
        matches = [hmac.compare_digest(hashed, known) for known in self._hashes]
        return scheme.lower() == "bearer" and any(matches)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        path = scope["path"]
        return path == "/" or any(path == each or path.startswith(f"{each}/") for each in _OPEN)


async def limited_body(request: Request, limit: int, seconds: float) -> bytes:
    """The whole body. Raises ApiError 413 and 408."""
    too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large

    async def read() -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
        return b"".join(chunks)

    try:
        return await asyncio.wait_for(read(), seconds)
    except ClientDisconnect:
        raise ClientGoneError from None
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s", kind="timeout") from None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
