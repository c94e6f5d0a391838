"""What every request passes on its way in and out: request id, API key, count, log; and how bodies are read within
limits."""

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import re
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.runtime.server.api_error import ApiError, ClientGoneError
from ingot.runtime.server.ids import Ids
from ingot.runtime.server.request_log import RequestLog

_OPEN = ("/health", "/version", "/metrics", "/openapi.json")  # and "/", without a key
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_CLIENT_GONE = 499  # nobody was there to answer
_SAFE = ("GET", "HEAD", "OPTIONS")  # change nothing
_FOREIGN = ApiError(
    403,
    "a page of another site may not call this server: start it with --cors_origin and the page's origin",
    kind="permission_error",
    code="foreign_origin",
)
_WRONG_KEY = ApiError(
    401,
    "the API key is missing or wrong",
    kind="authentication_error",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestContext:
    """Who asks. key: which of the server's keys; None: it has none, or the path needs none. session_id: the client's
    X-Session-Id, by which routers send the requests of a conversation to one replica; empty without one."""

    request_id: str
    key: int | None
    traceparent: str
    session_id: str = ""


class RequestGuard:
    """ASGI middleware. Gives each request an id, the client's X-Request-Id or its own, asks for a key, and counts and
    logs what was answered. Into the scope's state go `caller`, and from handlers `outcome`, a word, and
    `log_fields` for the log."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], log: RequestLog, origins: Sequence[str] = ()) -> None:
        self._app, self._log, self._ids, self._origins = app, log, Ids(), origins
        self._hashes = [_forms(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, headers = time.monotonic(), Headers(scope=scope)
        given, key = headers.get("x-request-id", ""), self._key(scope)
        request_id = given if _ID.fullmatch(given) else self._ids.make()
        session = _ID.fullmatch(headers.get("x-session-id", ""))
        session_id = session[0] if session else ""
        trace = headers.get("traceparent", "")
        caller = RequestContext(request_id=request_id, key=key, traceparent=trace, session_id=session_id)
        scope.setdefault("state", {})["caller"] = caller
        status = _CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                told = MutableHeaders(scope=message)
                told["x-request-id"] = request_id
                if session_id:
                    told["x-session-id"] = session_id
            await send(message)

        refusal = None
        if scope["method"] not in _SAFE and _is_foreign(headers, self._origins):
            refusal = _FOREIGN
        elif self._hashes and key is None and not _is_open(scope):
            refusal = _WRONG_KEY
        try:
            if refusal is not None:
                scope["state"]["outcome"] = refusal.code
                answer = JSONResponse(refusal.body(), refusal.status, refusal.headers)
                await answer(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except BaseException:
            status = 500
            raise
        finally:
            self._note(scope, status, time.monotonic() - begin)

    def _key(self, scope: Scope) -> int | None:
        """Which key came, as `Authorization: Bearer` or `X-Api-Key`; compares with every one in constant time."""
        given = []
        for name, value in scope["headers"]:
            scheme, _, key = value.partition(b" ")
            if name == b"x-api-key":
                given.append(value.strip())
            elif name == b"authorization" and scheme.lower() == b"bearer":
                given.append(key.strip())
        found = None
        for digest in map(_digest, given):
            for place, forms in enumerate(self._hashes):
                same = [hmac.compare_digest(digest, form) for form in forms]
                found = place if any(same) else found
        return found

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        """Probes, scrapes and the page are counted, not logged."""
        routes = {route.endpoint: route.path_format for route in scope["app"].routes}
        state = scope["state"]
        outcome = state.get("outcome") or ("done" if status < 400 else "refused")
        if "refusal" in state:  # the connection has answered
            status, outcome = state["refusal"].status, state["refusal"].code
        self._log.note(
            outcome,
            route=routes.get(scope.get("endpoint"), "other"),
            status=status,
            request_id=state["caller"].request_id,
            fields={"seconds": round(seconds, 4), **_session(state["caller"]), **state.get("log_fields", {})},
            is_quiet=_is_open(scope),
        )


def _is_foreign(headers: Headers, origins: Sequence[str]) -> bool:
    """Whether a browser says that a page of another site asks, which no --cors_origin lists. Browsers need no leave to
    send some requests, whose answers the page may not read."""
    origin = headers.get("origin")
    if origin is None or origin in origins or "*" in origins:
        return False
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin.partition("://")[2] != headers.get("host")


def _session(caller: RequestContext) -> dict[str, str]:
    return {"session_id": caller.session_id} if caller.session_id else {}


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


def _forms(key: str) -> list[bytes]:
    """Hashes of a key as clients may send it: in UTF-8, or, as many encode headers, in Latin-1."""
    forms = [key.encode("utf-8", "surrogateescape")]
    with contextlib.suppress(UnicodeEncodeError):
        forms.append(key.encode("latin-1"))
    return [_digest(form) for form in forms]


def _digest(key: bytes) -> bytes:
    """A digest has one length for keys of any length, so comparing does not tell the length either."""
    return hashlib.sha256(key).digest()
