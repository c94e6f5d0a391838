"""Spans reach a collector; one that is not there disturbs nobody."""

import dataclasses
import http.server
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from ingot.errors import UsageError
from ingot.runtime.server.tracing import Tracer
from tests.runtime.server.served import CONFIG, eventually, serving_engine

pytestmark = pytest.mark.native
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.ThreadingHTTPServer):
    """Keeps every span."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[trace_pb2.Span] = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.headers.get("content-encoding") is None
        document = ExportTraceServiceRequest.FromString(body)
        assert self.path == "/v1/traces"
        assert isinstance(self.server, Collector)
        for resource in document.resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def test_a_span_per_answer(engine: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the time is over before the request is prepared."""
    gate, begin = threading.Event(), time.time_ns() - 10**9
    config = dataclasses.replace(CONFIG, otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
    with serving_engine(engine, config) as served, served.http() as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 5, "ignore_eos": True}, headers=headers
        )
        with served.slowly():
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 400, "timeout": 0.3}, headers=headers)
        monkeypatch.setattr(served.service.templates, "render", lambda *_, **__: str(gate.wait(60)))
        chat = {"messages": [{"role": "user", "content": "a"}], "timeout": 0.05}
        assert http.post("/v1/chat/completions", json=chat, headers=headers).status_code == 408
        gate.set()
    assert eventually(lambda: len(collector.spans) == 3)  # what waits is sent at the end
    good, late, unprepared = collector.spans
    assert (good.trace_id.hex(), good.parent_span_id.hex(), good.kind) == (
        TRACE,
        PARENT,
        trace_pb2.Span.SPAN_KIND_SERVER,
    )
    attributes = {each.key: each.value for each in good.attributes}
    assert attributes["gen_ai.response.id"].string_value == answer.json()["id"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["gen_ai.request.model"].string_value == "tiny"
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["ingot.request_id"].string_value == "mine"
    assert attributes["gen_ai.operation.name"].string_value == "text_completion"
    assert attributes["gen_ai.usage.input_tokens"].int_value == answer.json()["usage"]["prompt_tokens"]
    assert attributes["http.route"].string_value == "/v1/completions"
    assert (attributes["ingot.sequences"].int_value, attributes["ingot.cached_tokens"].int_value) == (1, 0)
    times = [good.start_time_unix_nano, *(each.time_unix_nano for each in good.events), good.end_time_unix_nano]
    assert [event.name for event in good.events] == ["first_step", "first_token"]
    assert times == sorted(times)
    assert begin <= times[0] <= times[-1] <= time.time_ns() + 10**9, "clocks may be set"
    for each in (late, unprepared):
        assert (each.status.code, each.status.message) == (trace_pb2.Status.STATUS_CODE_ERROR, "deadline_exceeded")
    assert unprepared.name == "POST /v1/chat/completions"
    assert {each.key: each.value.string_value for each in unprepared.attributes}["gen_ai.operation.name"] == "chat"
    assert len({each.span_id for each in collector.spans}) == 3


def test_without_a_collector_answers_go_on(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(CONFIG, otlp_endpoint="http://127.0.0.1:9")
    with caplog.at_level("WARNING", "opentelemetry"), serving_engine(engine, config) as served, served.http() as http:
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert eventually(lambda: "127.0.0.1" in caplog.text)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageError, match=r"OpenTelemetry's SDK(.|\n)*\[otel\]"):
        Tracer("http://127.0.0.1:9")
