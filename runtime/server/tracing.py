"""Requests as OpenTelemetry spans, sent to a collector by the SDK's own thread. No request waits for it.

POST {endpoint}/v1/traces     a span per answer, child of the caller's `traceparent`, with the events
                              first_step and first_token and the attributes of the GenAI conventions
"""

import dataclasses
import time
from collections.abc import Mapping

from ingot import __version__
from ingot.errors import UsageError, install

_TIMEOUT = 3.0  # seconds for one batch of spans, attempts and all: a server that ends waits for the last one

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
    """Sends spans to a collector, in batches; what cannot be sent is dropped, and the SDK logs it."""

    def __init__(self, endpoint: str) -> None:
        """Raises UsageError without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise UsageError(
                "--otlp_endpoint needs OpenTelemetry's SDK", got=str(error), hint=install("otel")
            ) from error
        url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        self._provider = TracerProvider(resource=Resource.create({"service.name": "ingot"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_TIMEOUT)))
        self._tracer = self._provider.get_tracer("ingot", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._offset = time.time() - time.monotonic()

    def record(self, span: Span) -> None:
        """Send it soon. From any thread."""
        from opentelemetry.trace import SpanKind, StatusCode

        made = self._tracer.start_span(
            span.name,
            context=self._propagator.extract({"traceparent": span.traceparent}),
            kind=SpanKind.SERVER,
            attributes=span.attributes,
            start_time=self._nanoseconds(span.start),
        )
        for name, at in span.events.items():
            made.add_event(name, timestamp=self._nanoseconds(at))
        if span.error is None:
            made.set_status(StatusCode.OK)
        else:
            made.set_status(StatusCode.ERROR, span.error)
        made.end(self._nanoseconds(span.end))

    def close(self) -> None:
        """Send what waits, if the collector takes it."""
        self._provider.shutdown()

    def _nanoseconds(self, at: float) -> int:
        return int((at + self._offset) * 1e9)
