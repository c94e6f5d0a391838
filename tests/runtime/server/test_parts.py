"""Parts of the server by themselves: times, units, words and fields, whatever an engine does."""

import asyncio
import dataclasses
import json
import logging
import sys
import threading
import types
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ingot.configs.generation import GenerationDefaults
from ingot.configs.sampling import SamplingParams
from ingot.errors import CapacityError, RequestError
from ingot.runtime.event_queue import EventQueue, LoopBridge
from ingot.runtime.reports import Stats, StepReport
from ingot.runtime.request import FinishReason
from ingot.runtime.server import serve
from ingot.runtime.server.api_error import (
    NO_TOKEN,
    ApiError,
    failed,
    in_one_line,
    malformed,
    not_ready,
    refused,
    shutting_down,
)
from ingot.runtime.server.body import read_body
from ingot.runtime.server.generation import Generation, Order
from ingot.runtime.server.ids import Ids
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.middleware import RequestContext
from ingot.runtime.server.protocol import ChatRequest, CompletionRequest
from ingot.runtime.server.sampling_params import MAX_SCORES, check_logprobs, completion_params, text_requests
from ingot.runtime.server.service import retry_after
from ingot.runtime.text_stream import TextEvent


@pytest.mark.parametrize(
    ("ends", "now", "capacity", "seconds"),
    [
        ([], 9.0, 320, 1),
        ([5.0], 9.0, 320, 1),
        ([0.0, 5.0, 10.0, 15.0], 20.0, 40, 20),  # one in 5 s: a tenth of 40 takes 20 s
        ([0.0, 0.001], 0.002, 320, 1),
        ([0.0, 1.0], 2.0, 100, 10),
        ([0.0, 1.0], 2.1, 100, 11),
        ([0.0, 100.0], 200.0, 320, 60),
    ],
)
def test_retry_after_is_in_seconds(ends: list[float], now: float, capacity: int, seconds: int) -> None:
    assert retry_after(ends, now, capacity) == seconds


def test_refusals_for_now_tell_their_seconds() -> None:
    assert [shutting_down(seconds).headers["retry-after"] for seconds in (0.2, 30, 90.4)] == ["1", "30", "90"]
    assert not_ready("x").headers["retry-after"] == "5"


def sums(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Histogram → count and sum; counter → its value, twice."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[sample.name] = sample.value
    return {
        name.removesuffix("_count"): (value, found[name.removesuffix("_count") + "_sum"])
        for name, value in found.items()
        if name.endswith("_count")
    } | {name: (value, value) for name, value in found.items() if name.endswith("_total")}


def generation(metrics: Metrics, *, prompt_alone: bool = False, sequences: int = 2) -> Generation:
    """Arrived at 100 s; the sequences had their first step at 100.5 s."""
    caller = RequestContext(request_id="r", key=None, traceparent="")

    async def make() -> Generation:
        events = EventQueue(LoopBridge(asyncio.get_running_loop()))
        return Generation(Order(answer_id="a", caller=caller, n=sequences, prompt_alone=prompt_alone), events, metrics)

    made = asyncio.run(make())
    made.arrived = 100.0
    request = types.SimpleNamespace(started=100.5, num_prompt=7)
    made.groups = [[types.SimpleNamespace(request=request) for _ in range(sequences)]]  # type: ignore[misc]
    return made


def event(sequence: int, count: int, reason: FinishReason | None = None) -> TextEvent:
    return TextEvent(index=0, sequence=sequence, token_ids=(5,) * count, finish_reason=reason)


def test_latencies_have_the_values_of_the_clock() -> None:
    metrics = Metrics()
    made = generation(metrics)
    for when, what in (
        (102.0, event(0, 1)),
        (102.25, event(1, 1)),
        (103.0, event(0, 2)),
        (103.0, event(1, 1)),  # two tokens share a second
        (103.5, event(0, 0)),  # text that waited for its end
        (104.0, event(0, 1, FinishReason.LENGTH)),
        (107.0, event(1, 0, FinishReason.ABORT)),
    ):
        made._count(when, what)
    found = sums(metrics)
    assert found["ingot_queue_seconds"] == (2, 1.0)
    assert found["ingot_time_to_first_token_seconds"] == (2, 2.0 + 2.25)
    assert found["ingot_inter_token_latency_seconds"] == (4, 0.5 + 0.5 + 1.0 + 0.75)
    assert found["ingot_time_per_output_token_seconds"] == (2, 2.0 / 3 + 0.75), "from the first token to the last"
    assert found["ingot_generated_tokens_total"][0] == made.generated == 6
    assert found["ingot_prompt_tokens_total"][0] == 14
    assert made.moments == {"first_step": 100.5, "first_token": 102.0}


def test_tokens_that_come_at_once_have_gaps_of_nothing() -> None:
    metrics = Metrics()
    generation(metrics, sequences=1)._count(103.0, event(0, 4, FinishReason.STOP))
    found = sums(metrics)
    assert found["ingot_time_to_first_token_seconds"] == (1, 3.0)
    assert found["ingot_inter_token_latency_seconds"] == (3, 0.0)
    assert found["ingot_time_per_output_token_seconds"] == (1, 0.0)


def test_a_single_token_has_no_time_per_further_token() -> None:
    metrics = Metrics()
    generation(metrics, sequences=1)._count(103.0, event(0, 1, FinishReason.STOP))
    assert sums(metrics)["ingot_time_per_output_token_seconds"] == (0, 0.0)


def test_a_prompt_alone_generates_nothing() -> None:
    metrics = Metrics()
    made = generation(metrics, prompt_alone=True, sequences=1)
    made._count(103.0, event(0, 1, FinishReason.LENGTH))
    found = sums(metrics)
    assert made.generated == found["ingot_generated_tokens_total"][0] == 0
    assert found["ingot_prompt_tokens_total"][0] == 7
    assert found["ingot_queue_seconds"] == (1, 0.5)
    assert found["ingot_time_to_first_token_seconds"][0] == found["ingot_inter_token_latency_seconds"][0] == 0


def test_errors_in_openais_words() -> None:
    error = RequestError("max_tokens is wrong", where="prompt 1", expected="5", got="6", hint="ask for less")
    assert in_one_line(error) == "max_tokens is wrong (prompt 1); expected 5; got 6; ask for less"
    assert (refused(error).status, refused(error).param, refused(error).code) == (400, "max_tokens", None)
    for name, param in (("n", "n"), ("stop", "stop"), ("seed", "seed"), ("temperature", "temperature"), ("the", None)):
        assert refused(RequestError(f"{name} is wrong")).param == param
    for long in (CapacityError("too small"), RequestError("over max_seq_len"), RequestError("x", hint="max_input_len")):
        assert refused(long).code == "context_length_exceeded"
    broken = failed(RequestError("a step failed"))
    assert (broken.status, broken.kind, broken.headers) == (500, "server_error", {"x-should-retry": "false"})
    assert failed(RequestError(f"the rules {NO_TOKEN}")).status == 400
    assert (malformed("x" * 500, 501).status, len(malformed("x" * 500, 501).message) < 300) == (501, True)


def test_every_field_reaches_its_parameter() -> None:
    given: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "n": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [4],
        "bad_words": ["y"],
        "ignore_eos": True,
        "logit_bias": {"3": 1.0},
        "skip_special_tokens": False,
        "logprobs": 2,
    }
    body = {"prompt": "a", "include_stop_str_in_output": True, "priority": -3, "cache_salt": "s", **given}
    asked = read_body(CompletionRequest, json.dumps(body).encode())
    params = completion_params(asked, GenerationDefaults())
    expected = {**given, "logit_bias": {3: 1.0}, "include_stop_str": True, "prompt_logprobs": None}
    assert {name: getattr(params, name) for name in expected} == expected
    (request,) = text_requests(asked, ["a"], params)
    assert (request.prompt, request.priority, request.cache_salt) == ("a", -3, "s")


def test_ids_are_many_and_look_alike() -> None:
    ids, others = Ids(), Ids()
    made = {ids.make() for _ in range(1000)} | {others.make() for _ in range(1000)}
    assert len(made) == 2000
    assert all(len(each) == 24 and set(each) <= set("0123456789abcdef") for each in made)


def record(**extra: object) -> logging.LogRecord:
    try:
        raise ValueError("a bug")
    except ValueError:
        made = logging.LogRecord("ingot.server", logging.ERROR, "f", 1, "%s failed", ("it",), sys.exc_info())
    made.created, made.msecs = 1700000000.25, 250.0
    vars(made).update(extra)
    return made


def test_log_lines_have_everything() -> None:
    line = json.loads(serve._JsonLines().format(record(status=500, color_message="no")))
    assert line.pop("exception").endswith("ValueError: a bug")
    assert line == {"time": "2023-11-14T22:13:20.250Z", "level": "error", "message": "it failed", "status": 500}
    words = serve._Words().format(record(status=500))
    assert words.startswith("error: it failed status=500\nTraceback")


def test_a_step_that_never_ends_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(serve, "os", types.SimpleNamespace(_exit=codes.append))
    monkeypatch.setattr(serve, "_CLOSING", 0.01)
    gate = threading.Event()
    serve._close(types.SimpleNamespace(close=lambda: gate.wait(60)))  # type: ignore[arg-type]
    assert codes == [1]
    assert "a step did not end within 0.01 s" in caplog.text
    gate.set()
    serve._close(types.SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
    assert codes == [1]


def test_steps_and_blocks_by_kind() -> None:
    metrics = Metrics()
    stats: Any = dict.fromkeys(Stats.__annotations__, 0) | {"blocks_total": 10, "blocks_used": 3, "blocks_cached": 2}
    groups = [{"window": 0, "total": 6, "used": 1, "cached": 2}, {"window": 64, "total": 4, "used": 2, "cached": 0}]
    stats["blocks_by_group"] = groups[:1]
    metrics.watch(lambda: stats)
    report = StepReport(prefill_tokens=7, decode_rows=2, schedule_seconds=0.25, session_seconds=4.0, finish_seconds=0.5)
    metrics.step(report)
    metrics.step(dataclasses.replace(report, steps=3, prefill_tokens=0, session_seconds=0.01))
    value = metrics.registry.get_sample_value
    assert [value("ingot_step_tokens_sum", {"kind": kind}) for kind in ("prefill", "decode")] == [7, 8]
    assert [value("ingot_step_tokens_count", {"kind": kind}) for kind in ("prefill", "decode")] == [1, 4]
    seconds = [value("ingot_step_seconds_sum", {"phase": phase}) for phase in ("schedule", "session", "finish")]
    assert seconds == pytest.approx([1.0, 4.03, 2.0])
    at_most = {
        le: value("ingot_step_seconds_bucket", {"phase": "session", "le": le}) for le in ("0.005", "0.01", "+Inf")
    }
    assert at_most == {"0.005": 0, "0.01": 3, "+Inf": 4}
    kinds = ("used", "cached", "free")
    assert [value(f"ingot_blocks_{kind}") for kind in kinds] == [3, 2, 5]
    assert b"ingot_group_blocks" not in generate_latest(metrics.registry), "one group is all there is"
    stats["blocks_by_group"] = groups
    for group, window, expected in (("0", "0", [1, 2, 3]), ("1", "64", [2, 0, 2])):
        labels = [{"group": group, "window": window, "state": kind} for kind in kinds]
        assert [value("ingot_group_blocks", each) for each in labels] == expected
    assert [value(f"ingot_blocks_{kind}") for kind in kinds] == [3, 2, 5], "of all groups"


def test_without_a_limit_completions_are_short_and_chats_are_not() -> None:
    chat = read_body(ChatRequest, b'{"messages": [{"role": "user", "content": "a"}]}')
    completion = read_body(CompletionRequest, b'{"prompt": "a"}')
    params = SamplingParams(max_tokens=None)
    limits = [text_requests(asked, ["a"], params)[0].default_max_tokens for asked in (chat, completion)]
    assert limits == [None, 16]


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"logprobs": 1, "max_new_tokens": MAX_SCORES // 4}, 2),  # two numbers for each of a quarter
        ({"prompt_logprobs": 3, "num_prompt": MAX_SCORES // 12}, 3),
        ({"logprobs": 0, "prompt_logprobs": 0, "max_new_tokens": MAX_SCORES // 4, "num_prompt": MAX_SCORES // 4}, 2),
        ({}, 1000),
    ],
)
def test_so_many_probabilities_fit_into_an_answer(asked: dict[str, int], most: int) -> None:
    values = {"logprobs": None, "prompt_logprobs": None, "max_new_tokens": MAX_SCORES, "num_prompt": MAX_SCORES}
    stream: Any = types.SimpleNamespace(request=types.SimpleNamespace(**{**values, **asked}))
    check_logprobs([[stream] * most])
    check_logprobs([[stream]] * most)
    if asked:
        for groups in ([[stream] * (most + 1)], [[stream]] * (most + 1)):
            with pytest.raises(ApiError, match="logprobs: tokens x n"):
                check_logprobs(groups)
