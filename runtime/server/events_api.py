"""GET /kv/events: which blocks of tokens the prefix cache has, and what it gets and loses, for routers."""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ingot.runtime.block_events import BlockReader
from ingot.runtime.server.api_base import ApiBase
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.json_pieces import json_blocks
from ingot.runtime.server.openai_format import Json
from ingot.runtime.server.prefill_client import engine_digest
from ingot.runtime.server.service import Service

MOST_READERS = 16
_BETWEEN = 0.1  # seconds between two events
_SILENCE = 10.0  # seconds after which a comment tells the reader that the server is there


class EventsApi(ApiBase):
    """The handler."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._blocks = service.runner.blocks
        self._digest = engine_digest(service.runner.engine)

    async def events(self, request: Request) -> Response:
        """GET /kv/events."""
        if not self._blocks.has_prefix_cache:
            raise ApiError(400, "the server has no prefix cache (enable_prefix_cache)", code="prefix_cache_off")
        if len(self._blocks.events.readers) >= MOST_READERS:
            raise ApiError(
                429,
                f"{MOST_READERS} readers of /kv/events are connected; close one of them",
                kind="rate_limit_exceeded",
                code="too_many_readers",
            )
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        reader = self._blocks.events.read()
        return StreamingResponse(self._told(reader), media_type="text/event-stream", headers=headers)

    async def _told(self, reader: BlockReader) -> AsyncIterator[bytes]:
        """Until the client or the server leaves, or the client is too slow."""
        try:
            yield _event(
                "keys",
                {
                    "number": reader.number,
                    "engine": self._digest,
                    "tokens_per_block": self._blocks.tokens_per_block,
                    "keys": [key.hex() for key in reader.keys],
                },
            )
            reader.keys, said = (), time.monotonic()
            while self._why_not() is None and not reader.lost:
                changes = reader.fetch()
                if changes.stored or changes.removed:
                    stored, removed = ([key.hex() for key in keys] for keys in (changes.stored, changes.removed))
                    yield _event("changes", {"number": changes.number, "stored": stored, "removed": removed})
                    said = time.monotonic()
                elif time.monotonic() - said > _SILENCE:
                    yield b": nothing has changed\n\n"
                    said = time.monotonic()
                await asyncio.sleep(_BETWEEN)
        finally:
            reader.close()


def _event(name: str, data: Json) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + b"".join(json_blocks(data)) + b"\n\n"
