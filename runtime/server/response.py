"""A Generation → an HTTP answer: server-sent events or one JSON, given up at once when the client is gone.

Whatever ends the answer (the end, an error, a hang-up, a deadline, a reader that does not read), `Service.release`
follows, and the blocks come back.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from ingot.runtime.server.api_error import ApiError, ClientGoneError
from ingot.runtime.server.generation import Generation
from ingot.runtime.server.json_pieces import dump, json_blocks
from ingot.runtime.server.openai_format import ChunkBuilder, Counts, Json
from ingot.runtime.server.service import Service
from ingot.runtime.server.tracing import Attribute, Span

_SMALL = 8 << 10  # characters that are written where one waits for them
_BLOCK = 64 << 10  # bytes that are worth the effort of putting them together
NO_HEADERS: Mapping[str, str] = {}
KEEP_ALIVE = 15.0  # seconds without a piece after which a stream says that it still lives


class GeneratedResponse:
    """An ASGI response.

    generation   what is answered
    writer       makes the JSON
    stream       server-sent events; otherwise one JSON
    headers      of the answer, beside those of every answer
    """

    def __init__(
        self,
        service: Service,
        generation: Generation,
        writer: ChunkBuilder,
        *,
        route: str,
        n: int,
        stream: bool,
        model: str,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        self._service, self._generation, self._writer = service, generation, writer
        self._route, self._n, self._stream = route, n, stream
        self._model, self._headers = model, headers
        self._status = 0  # once the head of the answer is out
        self._last = time.monotonic()  # when the last piece was out
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GeneratedResponse, and release what was asked of the executor however that ends."""
        if self._stream:
            self._beat()
        outcome = "done"
        try:
            await (self._send_stream(send) if self._stream else self._send_whole(send))
        except ClientGoneError:
            outcome = "client gone"
        except ApiError as error:
            outcome = error.code or error.kind
            await self._send_error(send, error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._service.release(self._generation)
            self._note(scope["state"], outcome)

    def _beat(self) -> None:
        """Wake the stream when it has long been silent."""
        left = self._last + KEEP_ALIVE - time.monotonic()
        if left <= 0:
            self._generation.queue.poke()
        self._timer = asyncio.get_running_loop().call_later(left if left > 0 else KEEP_ALIVE, self._beat)

    async def _send_stream(self, send: Send) -> None:
        unfinished = self._generation.count
        while unfinished:
            events = await self._generation.events()
            opening = [] if self._status else self._events(self._writer.openings(self._counts()))
            touched: dict[int, None] = {}  # in order
            size = 0
            for event in events:
                choice = event.index * self._n + event.sequence
                size += self._writer.add(choice, event)
                unfinished -= event.finish_reason is not None
                touched[choice] = None
            if size > _SMALL:
                pieces = await self._service.aside(partial(self._pieces, touched, json_blocks))
            else:
                pieces = self._pieces(touched, lambda piece: [dump(piece)])
            if opening or pieces or not events:
                await self._send_pieces(send, [*opening, *pieces] or [b": waiting\n\n"])
        last = self._events(self._writer.endings(self._counts()))
        await self._send_pieces(send, [*last, self._writer.last], more=False)

    def _events(self, pieces: Iterable[Json]) -> list[bytes]:
        return [self._writer.name(piece) + _data(dump(piece)) for piece in pieces]

    def _pieces(self, choices: Iterable[int], write: Callable[[Json], list[bytes]]) -> list[bytes]:
        """What these choices have to say, as events."""
        pieces = [piece for choice in choices for piece in self._writer.pieces(choice)]
        return [part for piece in pieces for part in (self._writer.name(piece) + b"data: ", *write(piece), b"\n\n")]

    async def _send_whole(self, send: Send) -> None:
        unfinished, size = self._generation.count, 0
        while unfinished:
            for event in await self._generation.events():
                size += self._writer.add(event.index * self._n + event.sequence, event)
                unfinished -= event.finish_reason is not None
        whole = self._writer.whole(self._counts())
        blocks = [dump(whole)] if size <= _SMALL else await self._service.aside(partial(json_blocks, whole))
        length = sum(map(len, blocks))
        await self._start(send, 200, "application/json", {"content-length": str(length)})
        for place, block in enumerate(blocks, 1):
            await self._send(send, block, more=place < len(blocks))

    async def _send_pieces(self, send: Send, pieces: list[bytes], *, more: bool = True) -> None:
        if not self._status:
            await self._start(send, 200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"})
        if sum(map(len, pieces)) < _BLOCK:
            pieces = [b"".join(pieces)]
        for place, piece in enumerate(pieces, 1):
            await self._send(send, piece, more=more or place < len(pieces))

    async def _send_error(self, send: Send, error: ApiError) -> None:
        """As the answer itself, or, where it has begun, as the last piece of the stream."""
        if self._status:
            await self._send(send, b"".join(self._events([self._writer.failure(error)])), more=False)
            return
        body = dump(self._writer.refusal(error))
        await self._start(send, error.status, "application/json", {"content-length": str(len(body)), **error.headers})
        await self._send(send, body, more=False)

    async def _start(self, send: Send, status: int, media: str, headers: Mapping[str, str]) -> None:
        self._status = status
        pairs = {"content-type": media, **headers, **self._headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._last = time.monotonic()

    def _counts(self) -> Counts:
        generation = self._generation
        return Counts(
            prompt=generation.prompt_tokens(),
            cached=generation.cached_tokens(),
            generated=generation.generated,
            reasoning=generation.reasoning,
        )

    def _note(self, state: dict[str, Any], outcome: str) -> None:
        generation, now = self._generation, time.monotonic()
        outcome = "client does not read" if "deaf" in state else outcome
        self._service.metrics.generation_ended(now - generation.arrived)
        if self._service.tracer is not None:
            self._service.tracer.record(self._span(outcome, now))
        state["outcome"] = outcome
        state["log_fields"] = {
            "answer_id": generation.answer_id,
            "prompt_tokens": generation.prompt_tokens(),
            "generated_tokens": generation.generated,
        }

    def _span(self, outcome: str, now: float) -> Span:
        generation = self._generation
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": "text_completion" if self._route == "/v1/completions" else "chat",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": generation.answer_id,
            "gen_ai.usage.input_tokens": generation.prompt_tokens(),
            "gen_ai.usage.output_tokens": generation.generated,
            "http.route": self._route,
            "http.response.status_code": self._status,
            "ingot.request_id": generation.caller.request_id,
            "ingot.cached_tokens": generation.cached_tokens(),
            "ingot.sequences": generation.count,
        }
        if generation.caller.session_id:
            attributes["ingot.session_id"] = generation.caller.session_id
        return Span(
            name=f"POST {self._route}",
            traceparent=generation.caller.traceparent,
            start=generation.arrived,
            end=now,
            attributes=attributes,
            events=generation.moments,
            error=None if outcome == "done" else outcome,
        )


def _data(piece: bytes) -> bytes:
    return b"data: " + piece + b"\n\n"
