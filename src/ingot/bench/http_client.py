"""One streamed completion over HTTP, with the time of every piece."""

import asyncio
import dataclasses
import json
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from ingot.errors import UsageError, install


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


class Client:
    """An OpenAI-compatible server, http://host:port with or without /v1; every request on its way has a connection.

    async with Client(url, api_key) as client: ...
    """

    def __init__(self, url: str, api_key: str | None, *, keep_alive: bool = True) -> None:
        """keep_alive: connections are used again; a server that closes idle ones may do so just then.

        Raises UsageError for a URL that cannot be used, and without the extra.
        """
        try:
            import httpx
        except ImportError as error:
            raise UsageError("--url needs httpx", hint=install("bench")) from error
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError("--url is not the address of a server", expected="http://host:port", got=url)
        self._failure = httpx.HTTPError
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1") + "/v1",
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None if keep_alive else 0),
            timeout=None,  # each request has a limit of its own
            trust_env=False,  # a proxy would be measured as well
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def get_json(self, path: str) -> Any:
        """GET a small document. Raises OSError and ValueError."""
        try:
            answer = await self._http.get(path)
        except self._failure as error:
            raise OSError(str(error)) from error
        if answer.status_code != 200:
            raise ValueError(f"GET {path} was answered with status {answer.status_code}: {answer.text[:200]}")
        return answer.json()

    async def stream(self, path: str, body: Mapping[str, Any], timeout: float, answer: Answer | None = None) -> Answer:
        """Ask for a streamed completion, to its end. Never raises: what goes wrong is in the answer.

        answer: a new one of the caller's, who looks at it meanwhile.
        """
        answer = Answer(start=0.0) if answer is None else answer
        answer.start = time.perf_counter()
        try:
            await asyncio.wait_for(self._stream(path, body, answer), timeout)
        except asyncio.TimeoutError:
            answer.error = f"no end within {timeout:g} s"
        except (OSError, ValueError, TypeError, AttributeError, self._failure) as error:  # no piece of OpenAI's either
            answer.error = f"{type(error).__name__}: {error}"
        answer.end = time.perf_counter()
        answer.tokens = answer.tokens or len(answer.pieces)
        return answer

    async def _stream(self, path: str, body: Mapping[str, Any], answer: Answer) -> None:
        async with self._http.stream("POST", path, json={**body, "stream": True}) as got:
            if got.status_code != 200:
                answer.error = f"status {got.status_code}: {_message(await got.aread())}"
                return
            held = b""
            async for piece in got.aiter_bytes():  # httpx's lines end at U+2028 and others too, which may be text
                *lines, held = (held + piece).split(b"\n")
                for line in lines:
                    _read_line(line.decode(), answer)
        if answer.error is None and not answer.pieces and not answer.tokens:
            answer.error = "the stream held no text"


def _read_line(line: str, answer: Answer) -> None:
    """One line of the server-sent events."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError(f"a piece of the answer is not a JSON object: {data[:100]}")
    if "error" in document:
        error = document["error"]
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return
    counts = document.get("usage") or {}
    answer.tokens = counts.get("completion_tokens") or answer.tokens
    answer.prompt_tokens = counts.get("prompt_tokens") or answer.prompt_tokens
    for choice in document.get("choices") or ():
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            answer.pieces.append(time.perf_counter())


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
