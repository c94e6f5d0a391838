"""Spans reach a collector in OTLP's JSON; a collector that is not there disturbs nobody."""

import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.served import CONFIG, eventually, serving_engine

pytestmark = pytest.mark.native
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.ThreadingHTTPServer):
    """Keeps every span."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[dict[str, Any]] = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/v1/traces"
        assert isinstance(self.server, Collector)
        for resource in document["resourceSpans"]:
            self.server.spans += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
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


def test_a_span_per_answer(engine: Path, collector: Collector) -> None:
    config = dataclasses.replace(CONFIG, otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
    with serving_engine(engine, config) as served, served.http() as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 5, "ignore_eos": True}, headers=headers
        )
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 400, "timeout": 0.001}, headers=headers)
        assert eventually(lambda: len(collector.spans) == 2)
    good, late = collector.spans
    assert (good["traceId"], good["parentSpanId"], good["kind"]) == (TRACE, PARENT, 2)
    attributes = {each["key"]: next(iter(each["value"].values())) for each in good["attributes"]}
    assert attributes["gen_ai.response.id"] == answer.json()["id"]
    assert attributes["gen_ai.usage.output_tokens"] == "5"
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["http.response.status_code"] == "200"
    assert attributes["ingot.request_id"] == "mine"
    times = [good["startTimeUnixNano"], *(event["timeUnixNano"] for event in good["events"]), good["endTimeUnixNano"]]
    assert [event["name"] for event in good["events"]] == ["first_step", "first_token"]
    assert [int(time) for time in times] == sorted(int(time) for time in times)
    assert late["status"] == {"code": 2, "message": "deadline_exceeded"}
    assert late["spanId"] != good["spanId"]


def test_without_a_collector_answers_go_on(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "ingot.server"):
        config = dataclasses.replace(CONFIG, otlp_endpoint="http://127.0.0.1:9")
        with serving_engine(engine, config) as served, served.http() as http:
            for _ in range(3):
                assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert eventually(lambda: "takes no spans" in caplog.text)
    assert caplog.text.count("takes no spans") == 1
