"""One streamed completion over HTTP/1.1, with the time of every piece. No library: a load generator must be light."""

import asyncio
import dataclasses
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ingot.errors import UsageError

_LIMIT = 1 << 20  # bytes of one line


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where an OpenAI-compatible server listens. path: of its /v1."""

    host: str
    port: int
    tls: bool
    path: str
    headers: Mapping[str, str]


@dataclasses.dataclass(kw_only=True, slots=True)
class Answer:
    """What came back. start, pieces, end: time.perf_counter(). error: words, where the request failed.

    pieces        when each piece with text came
    tokens        generated, as the server counts them, or else the number of pieces
    """

    start: float
    pieces: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int | None = None
    tokens: int = 0
    error: str | None = None


def read_server(url: str, api_key: str | None) -> Server:
    """http://host:port, with or without /v1. Raises UsageError."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("the URL cannot be used", expected="http://host:port", got=url)
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
    tls = parts.scheme == "https"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return Server(host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls, path=path, headers=headers)


async def get_json(server: Server, path: str) -> Any:
    """GET a small document below /v1. Raises OSError and ValueError."""
    async with _Exchange(server) as exchange:
        status = await exchange.ask("GET", path, b"")
        body = b"".join([piece async for piece in exchange.body()])
    if status != 200:
        raise ValueError(f"status {status}: {body[:200].decode(errors='replace')}")
    return json.loads(body)


async def stream(server: Server, path: str, body: Mapping[str, Any], timeout: float) -> Answer:
    """Ask for a streamed completion, to its end. Never raises: what goes wrong is in the answer."""
    answer = Answer(start=time.perf_counter())
    try:
        await asyncio.wait_for(_stream(server, path, body, answer), timeout)
    except asyncio.TimeoutError:
        answer.error = f"no end within {timeout:g} s"
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end = time.perf_counter()
    answer.tokens = answer.tokens or len(answer.pieces)
    return answer


async def _stream(server: Server, path: str, body: Mapping[str, Any], answer: Answer) -> None:
    async with _Exchange(server) as exchange:
        status = await exchange.ask("POST", path, json.dumps({**body, "stream": True}).encode())
        if status != 200:
            text = b"".join([piece async for piece in exchange.body()])
            answer.error = f"status {status}: {_message(text)}"
            return
        held = b""
        async for piece in exchange.body():
            *events, held = (held + piece).split(b"\n\n")
            for event in events:
                _take(event.strip(), answer)
    if answer.error is None and not answer.pieces and not answer.tokens:
        answer.error = "the stream held no text"


def _take(event: bytes, answer: Answer) -> None:
    """One server-sent event."""
    data = event.removeprefix(b"data:").strip()
    if not event.startswith(b"data:") or data == b"[DONE]":
        return
    document = json.loads(data)
    if "error" in document:
        answer.error = str(document["error"].get("message", document["error"]))
        return
    counts = document.get("usage") or {}
    answer.tokens = counts.get("completion_tokens", answer.tokens)
    answer.prompt_tokens = counts.get("prompt_tokens", answer.prompt_tokens)
    for choice in document.get("choices", ()):
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            answer.pieces.append(time.perf_counter())


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


class _Exchange:
    """One request on a connection of its own."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._chunked, self._length = False, -1

    async def __aenter__(self) -> "_Exchange":
        server = self._server
        context = ssl.create_default_context() if server.tls else None
        self._reader, self._writer = await asyncio.open_connection(server.host, server.port, ssl=context, limit=_LIMIT)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, body: bytes) -> int:
        """Send, and read the head of the answer; its status."""
        server = self._server
        headers = {
            "Host": f"{server.host}:{server.port}", "Connection": "close", "Content-Type": "application/json",
            "Content-Length": str(len(body)), **server.headers,
        }  # fmt: skip
        lines = [f"{method} {server.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self._writer.drain()
        first = (await self._reader.readline()).split()
        if len(first) < 2 or not first[1].isdigit():
            raise ValueError("the answer is not HTTP")
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            self._chunked |= name.lower() == "transfer-encoding" and value.strip().lower() == "chunked"
            if name.lower() == "content-length":
                self._length = int(value)
        return int(first[1])

    async def body(self) -> AsyncIterator[bytes]:
        """Its pieces, as they come."""
        if self._chunked:
            while size := int((await self._reader.readline()).split(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        elif self._length >= 0:
            yield await self._reader.readexactly(self._length)
        else:
            while piece := await self._reader.read(65536):
                yield piece
