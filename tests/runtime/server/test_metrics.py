"""/metrics tells what happened, and the dashboard asks for nothing that is not there."""

import concurrent.futures
import dataclasses
import json
import logging
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.house.project import ROOT
from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

pytestmark = pytest.mark.native


def read(served: Served) -> dict[tuple[str, str], float]:
    """(sample, its labels but le) → value, buckets left out."""
    with served.http() as http:
        text = http.get("/metrics").text
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_what_happened_is_counted(engine: Path) -> None:
    body = {"prompt": "The prince looked at the count " * 10, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    with serving_engine(engine, max_num_tokens=32) as served, served.http() as http:
        prompt = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
        again = http.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
        last = json.loads(again.text.split("\n\n")[-3].removeprefix("data: "))
        hits = last["usage"]["prompt_tokens_details"]["cached_tokens"]
        http.post("/v1/completions", json={**body, "timeout": 1e-6})
        assert eventually(served.is_empty)
        cached = served.runner.stats()["prefix_hit_tokens"]
        expected = {
            ("ingot_prompt_tokens_total", ""): 2 * prompt,
            ("ingot_generated_tokens_total", ""): 20,
            ("ingot_requests_total", "/v1/completions,200"): 2,
            ("ingot_requests_total", "/v1/completions,408"): 1,
            ("ingot_time_to_first_token_seconds_count", ""): 2,
            ("ingot_queue_seconds_count", ""): 2,
            ("ingot_inter_token_latency_seconds_count", ""): 18,
            ("ingot_time_per_output_token_seconds_count", ""): 2,
            ("ingot_prefix_hit_tokens_total", ""): cached,
            ("ingot_blocks_used", ""): 0,
            ("ingot_requests_running", ""): 0,
        }
        assert cached >= hits > 0, "the request that timed out may have begun"

        def seen() -> dict[tuple[str, str], float]:
            found = read(served)
            for phase in ("session", "schedule"):  # the last one may end after its requests were aborted
                expected["ingot_step_seconds_count", phase] = served.runner.executor.work().steps
            expected["ingot_prefix_hit_tokens_total", ""] = served.runner.stats()["prefix_hit_tokens"]
            return {key: found.get(key, -1) for key in expected}

        eventually(lambda: seen() == expected)
        assert {key: (value, expected[key]) for key, value in seen().items() if value != expected[key]} == {}
        found = read(served)
        blocks = [found[f"ingot_blocks_{kind}", ""] for kind in ("total", "used", "cached", "free")]
        assert blocks[0] == sum(blocks[1:])
        log = served.runner.step_log()
        assert found["ingot_step_tokens_sum", "prefill"] == sum(prefill for prefill, _ in log)
        assert found["ingot_step_tokens_sum", "decode"] == sum(decode for _, decode in log)
        waited, first = found["ingot_queue_seconds_sum", ""], found["ingot_time_to_first_token_seconds_sum", ""]
        assert 0 < waited < first < found["ingot_request_seconds_sum", ""]


def test_drafts_are_counted_and_answers_stay_the_same(engine: Path) -> None:
    said = "The prince looked at the count. " * 8
    body = {"prompt": said, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with serving_engine(engine) as plain, plain.http() as http:
        expected = http.post("/v1/completions", json=body).json()["choices"]
        assert not any(name == "ingot_drafted_tokens_total" for name, _ in read(plain))
    drafts = {"method": "ngram", "prompt_lookup_min": 1}
    with serving_engine(engine, speculative_config=drafts) as served, served.http() as http:
        assert http.post("/v1/completions", json=body).json()["choices"] == expected
        work = served.runner.executor.work()
        found = read(served)
        right, wrong = (found.get(("ingot_drafted_tokens_total", outcome), 0) for outcome in ("right", "wrong"))
        assert (right, right + wrong) == (work.right_drafts, work.drafted)
        assert work.drafted > 0


def test_a_scrape_tells_what_is_now(engine: Path) -> None:
    """And waits for no step."""
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 2}
    with serving_engine(engine) as served, served.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        with served.slowly():
            running = pool.submit(http.post, "/v1/completions", json=body, headers={"x-request-id": "mine"})
            assert eventually(lambda: served.runner.stats()["requests_running"] == 2)
            found = read(served)
            assert (found["ingot_requests_running", ""], found["ingot_requests_waiting", ""]) == (2, 0)
            assert found["ingot_blocks_used", ""] > 0
            http.post("/v1/requests/mine/cancel").raise_for_status()
        assert running.result().status_code == 499
        assert eventually(served.is_empty)
        assert eventually(served.is_between_steps)
        found, steps = read(served), served.runner.executor.work().steps
        assert (found["ingot_requests_running", ""], found["ingot_blocks_used", ""]) == (0, 0)
        assert found["ingot_step_seconds_count", "session"] == steps > 0


def test_refusals_are_counted_and_logged(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(CONFIG, api_keys=("key",), max_body_bytes=1000, log_json=True)
    with (
        serving_engine(engine, config) as served,
        served.http("key") as http,
        caplog.at_level(logging.INFO, "ingot.server"),
    ):
        bodies = ({"prompt": "a", "x": 1}, {"prompt": "a", "max_tokens": 10**6}, {"prompt": "a" * 2000})
        for number, body in enumerate(bodies):
            http.post("/v1/completions", json=body, headers={"x-request-id": f"r{number}"})
            assert eventually(lambda: len(caplog.records) == number + 1), "a log line comes after its answer"  # noqa: B023
        httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"})
        http.get("/v1/models/nobody")
        http.get("/nowhere")
        http.get("/v1/completions")
        http.post("/tokenize", json={"prompt": "a"})
        assert eventually(lambda: len(caplog.records) == 8)
        found = {key[1]: value for key, value in read(served).items() if key[0] == "ingot_requests_total"}
    assert found == {
        "/v1/completions,400": 2,
        "/v1/completions,413": 1,
        "other,401": 1,
        "/v1/models/{model},404": 1,
        "other,404": 1,
        "/v1/completions,405": 1,
        "/tokenize,200": 1,
    }
    assert [(record.getMessage(), vars(record)["status"]) for record in caplog.records] == [
        ("unknown_parameter", 400),
        ("context_length_exceeded", 400),
        ("body_too_large", 413),
        ("invalid_api_key", 401),
        ("model_not_found", 404),
        ("refused", 404),
        ("refused", 405),
        ("done", 200),
    ]
    assert [vars(record)["request_id"] for record in caplog.records[:3]] == ["r0", "r1", "r2"]


def test_the_dashboard_asks_for_what_is_there(served: Served) -> None:
    dashboard = json.loads((ROOT / "examples/deploy/dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"ingot_\w+", text)}
    with served.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).raise_for_status()
        assert eventually(lambda: 'ingot_step_seconds_bucket{le="0.1",phase="session"}' in http.get("/metrics").text)
        text = http.get("/metrics").text
    there = set(re.findall(r"^(ingot_\w+)", text, flags=re.MULTILINE))
    assert len(asked) >= 20
    assert asked <= there
    for expression in expressions:
        for name, label, value in re.findall(r'(ingot_\w+)\{(\w+)="(\w+)"\}', expression):
            assert re.search(rf'^{name}\{{.*{label}="{value}"', text, flags=re.MULTILINE)
        for label in re.findall(r"by \((\w+)\)", expression):
            assert label == "le" or f'{label}="' in text
