"""/metrics tells what happened, and the dashboard asks for nothing that is not there."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.house.project import ROOT
from tests.runtime.server.served import Served, eventually, serving_engine

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


def test_the_dashboard_asks_for_what_is_there(served: Served) -> None:
    dashboard = json.loads((ROOT / "examples/deploy/dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"ingot_\w+", text)}
    with served.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).raise_for_status()
        assert eventually(lambda: 'ingot_step_seconds_bucket{le="0.1",phase="session"}' in http.get("/metrics").text)
        there = set(re.findall(r"^(ingot_\w+)", http.get("/metrics").text, flags=re.MULTILINE))
    assert len(asked) >= 20
    assert asked <= there
