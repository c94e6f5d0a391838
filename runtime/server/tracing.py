"""Requests as OpenTelemetry spans: OTLP over HTTP in JSON, sent by a thread of its own. No request waits for it.

POST {endpoint}/v1/traces     a span per answer, child of the caller's `traceparent`, with the events
                              first_step and first_token and the attributes of the GenAI conventions
"""

import dataclasses
import json
import logging
import queue
import re
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from ingot import __version__

_LOG = logging.getLogger("ingot.server")
_WAITING = 10_000  # spans; more are dropped
_BATCH = 512
_TIMEOUT = 10.0  # seconds
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_SERVER, _OK, _ERROR = 2, 1, 2  # OTLP's numbers

Attribute = str | int | float | bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """start, end and the times of events: time.monotonic()."""

    name: str
    traceparent: str
    start: float
    end: float
    attributes: Mapping[str, Attribute]
    events: Mapping[str, float]
    error: str | None = None


class Tracer:
    """Sends spans to a collector, in batches; what cannot be sent is dropped with a warning."""

    def __init__(self, endpoint: str) -> None:
        self._url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        self._spans: queue.Queue[Span | None] = queue.Queue(_WAITING)
        self._offset = time.time() - time.monotonic()
        self._warned = -1e9
        self._thread = threading.Thread(target=self._send_all, name="ingot traces", daemon=True)
        self._thread.start()

    def record(self, span: Span) -> None:
        """Send it soon. From any thread."""
        try:
            self._spans.put_nowait(span)
        except queue.Full:
            self._warn("too many spans wait for the collector")

    def close(self) -> None:
        """Send what waits, if the collector takes it."""
        try:
            self._spans.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_TIMEOUT)

    def _send_all(self) -> None:
        while (first := self._spans.get()) is not None:
            batch: list[Span] = [first]
            ended = False
            while len(batch) < _BATCH and not self._spans.empty():
                following = self._spans.get()
                if following is None:
                    ended = True
                    break
                batch.append(following)
            self._send(batch)
            if ended:
                return

    def _send(self, spans: Sequence[Span]) -> None:
        scope = {"scope": {"name": "ingot", "version": __version__}, "spans": [self._json(span) for span in spans]}
        resource = {"attributes": _attributes({"service.name": "ingot"})}
        document = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
        request = urllib.request.Request(
            self._url, data=json.dumps(document).encode(), headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                answer.read()
        except (OSError, ValueError) as error:
            self._warn(f"the collector takes no spans: {error}")

    def _json(self, span: Span) -> dict[str, Any]:
        parent = _PARENT.fullmatch(span.traceparent)
        return {
            "traceId": parent[1] if parent else secrets.token_hex(16),
            "spanId": secrets.token_hex(8),
            **({"parentSpanId": parent[2]} if parent else {}),
            "name": span.name,
            "kind": _SERVER,
            "startTimeUnixNano": self._nanoseconds(span.start),
            "endTimeUnixNano": self._nanoseconds(span.end),
            "attributes": _attributes(span.attributes),
            "events": [{"name": name, "timeUnixNano": self._nanoseconds(at)} for name, at in span.events.items()],
            "status": {"code": _OK} if span.error is None else {"code": _ERROR, "message": span.error},
        }

    def _nanoseconds(self, at: float) -> str:
        return str(int((at + self._offset) * 1e9))

    def _warn(self, words: str) -> None:
        if time.monotonic() - self._warned > 60:
            self._warned = time.monotonic()
            _LOG.warning("traces: %s", words)


def _attributes(values: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    found = []
    for key, value in values.items():
        if isinstance(value, bool):
            found.append({"key": key, "value": {"boolValue": value}})
        elif isinstance(value, int):
            found.append({"key": key, "value": {"intValue": str(value)}})
        elif isinstance(value, float):
            found.append({"key": key, "value": {"doubleValue": value}})
        else:
            found.append({"key": key, "value": {"stringValue": value}})
    return found
