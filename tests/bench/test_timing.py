"""The figures of the benchmarks are what their names say."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.bench.bytes_read import decode_bytes, kv_bytes_per_token, weight_bytes_per_step
from ingot.bench.latency import LatencyOptions, check_lengths, summarise
from ingot.bench.throughput import ThroughputOptions, bench_throughput
from ingot.bench.timing import RequestTimes, Round, random_prompts, time_requests
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.sampling import SamplingParams
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.errors import UsageError
from ingot.plan import Buffer, Limits, Plan, Rows
from ingot.runtime.reports import Work
from tests.handmade import TINY_LLAMA, write_model


def test_tpot_is_the_time_after_the_first_token_over_the_other_tokens() -> None:
    times = RequestTimes(tokens=(0.5, 0.6, 0.9, 1.1))
    assert times.ttft == 0.5
    assert times.end == 1.1
    assert times.tpot == pytest.approx((1.1 - 0.5) / 3)
    assert times.gaps == pytest.approx((0.1, 0.3, 0.2))
    assert RequestTimes(tokens=(0.5,)).tpot is None


class Clock:
    """An executor whose session has computed for one more second, and four more steps, at each reading."""

    def __init__(self) -> None:
        self.readings = 0

    def work(self) -> Work:
        self.readings += 1
        return Work(steps=4 * self.readings, session_seconds=float(self.readings))


class Runner:
    """Gives one, then two tokens per step to the first request, and one at a time to the second."""

    def __init__(self) -> None:
        self.executor = Clock()

    def generate(self, *, batch_input_ids: Sequence[Sequence[int]], **options: object) -> Iterator[dict[str, Any]]:
        params = SamplingParams(temperature=0.5, max_tokens=3)
        assert options == {"sampling_config": params, "end_id": -1, "streaming": True, "return_dict": True}
        prompt = len(batch_input_ids[0])
        for generated in ([1, 0], [3, 1], [3, 2], [3, 3]):
            yield {"sequence_lengths": np.array(generated)[:, None] + prompt}


def test_every_token_gets_the_time_of_its_step() -> None:
    measured = time_requests(Runner(), [[1, 2], [3, 4]], 3, SamplingParams(temperature=0.5))  # type: ignore[arg-type]
    first, second = (request.tokens for request in measured.requests)
    assert (measured.steps, measured.tokens) == (4, 6)
    assert len(first) == len(second) == 3
    assert first[0] < first[1] == first[2]
    assert second[0] == first[1]
    assert measured.seconds == second[-1]
    assert measured.session_seconds == 1.0


def test_random_prompts_are_different_and_repeatable() -> None:
    prompts = random_prompts(3, 20, 50, 4)
    assert prompts == random_prompts(3, 20, 50, 4)
    assert prompts[0] not in random_prompts(3, 20, 50, 4, 1)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("plan")
    model = write_model(work / "m", {**TINY_LLAMA, "hidden_size": 32, "head_dim": 16, "intermediate_size": 48})
    convert(ConvertOptions(model_dir=model, output_dir=work / "c"))
    build(BuildConfig(target="ref", precision="f32"), work / "c", work / "e")
    return work / "e"


@pytest.fixture(scope="module")
def plan(engine: Path) -> Plan:
    return read_plan(engine)


def test_a_decode_step_reads_all_weights_but_the_token_table(plan: Plan) -> None:
    # 2 layers of q, k, v, o (4 heads, 2 KV heads of 16) and gate, up, down; lm_head padded to 64 rows; five norms;
    # 8 rotary frequencies. Products are padded to 16 rows, which only the vocabulary needs.
    per_layer = 32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48
    expected = 4 * (2 * per_layer + 64 * 32 + 5 * 32 + 8)
    assert weight_bytes_per_step(plan) == expected


def test_of_experts_those_that_are_taken_are_read(plan: Plan) -> None:
    whole = next(step for step in plan.steps if step.name == "layers.0/gate_up")
    weight = next(weight for weight in plan.weights if weight.name == whole.inputs[1])
    experts = dataclasses.replace(weight, shape=(20, *weight.shape), nbytes=20 * weight.nbytes)
    slots = Buffer(name="ids", rows=Rows.TOKENS, cols=4, offset=0)
    step = dataclasses.replace(whole, op="moe_gate_up", inputs=(whole.inputs[0], "ids", weight.name))
    changed = dataclasses.replace(plan, weights=(experts,), buffers=(*plan.buffers, slots), steps=(step,))
    assert weight_bytes_per_step(changed) == 4 * weight.nbytes
    assert weight_bytes_per_step(changed, 2) == round(20 * (1 - 0.8**2) * weight.nbytes)


def test_each_request_reads_its_own_context(plan: Plan) -> None:
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, dims, bytes
    assert kv_bytes_per_token(plan) == per_token
    assert decode_bytes(plan, batch_size=3, context=10) == weight_bytes_per_step(plan) + 30 * per_token


def test_a_latency_report_holds_medians(plan: Plan) -> None:
    options = LatencyOptions(engine_dir=Path("e"), input_len=8, output_len=2)
    rounds = [Round(requests=(RequestTimes(tokens=(t, t + 0.25)),), steps=2) for t in (0.1, 0.2, 0.9)]
    report = summarise(plan, options, 1, rounds, machine_gbs=2.0)
    assert report.ttft_ms == pytest.approx(200)
    assert report.tpot_ms == pytest.approx(250)
    assert report.itl_ms == pytest.approx((250,))
    assert report.tokens_per_second == pytest.approx(2 / 0.45)
    moved = decode_bytes(plan, batch_size=1, context=9)
    assert report.bandwidth_gbs == pytest.approx(moved / 0.25 / 1e9)
    assert report.bandwidth_fraction == pytest.approx(moved / 0.25 / 2e9)


def test_latency_takes_medians_of_gaps_and_the_context_in_the_middle(plan: Plan) -> None:
    options = LatencyOptions(engine_dir=Path("e"), input_len=8, output_len=4)
    gaps = ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3), (0.7, 0.2, 0.9))
    rounds = [Round(requests=(RequestTimes(tokens=(1.0, *(1 + np.cumsum(each)).tolist())),), steps=4) for each in gaps]
    report = summarise(plan, options, 1, rounds, machine_gbs=2.0)
    assert report.itl_ms == pytest.approx((100, 200, 300))
    assert report.bandwidth_gbs == pytest.approx(decode_bytes(plan, batch_size=1, context=10) / 0.2 / 1e9)


def test_what_the_host_takes() -> None:
    requests = tuple(RequestTimes(tokens=(0.5, end)) for end in (1.0, 4.0, 2.0))
    measured = Round(requests=requests, steps=3, session_seconds=3.0)
    assert (measured.seconds, measured.host_fraction, measured.tokens) == (4.0, 0.25, 6)


@pytest.mark.parametrize(("input_len", "output_len", "fits"), [(8, 56, True), (8, 57, False), (33, 1, False)])
def test_lengths_up_to_the_engines_limits(input_len: int, output_len: int, fits: bool) -> None:
    limits = Limits(max_batch_size=1, max_input_len=32, max_seq_len=64, max_num_tokens=32, max_logit_rows=1)
    with contextlib.nullcontext() if fits else pytest.raises(UsageError):
        check_lengths(limits, input_len=input_len, output_len=output_len)


def test_a_throughput_report_by_hand(engine: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests of 8 tokens in and 4 out, in rounds of 2, 4 and 5 seconds after one that warms up."""
    seconds = iter((100.0, 2.0, 5.0, 4.0))

    def round_of(*arguments: object) -> Round:
        end = next(seconds)
        request = RequestTimes(tokens=(0.25 * end, 0.5 * end, 0.75 * end, end))
        return Round(requests=(request,) * 3, steps=6, session_seconds=0.75 * end)

    monkeypatch.setattr("ingot.bench.throughput.time_requests", round_of)
    monkeypatch.setattr("ingot.bench.throughput.machine_bandwidth", lambda *_: 2e9)
    options = ThroughputOptions(engine_dir=engine, num_requests=3, input_len=8, output_len=4)
    report = bench_throughput(options, lambda *_: None)
    assert report.seconds == 4
    assert report.requests_per_second == pytest.approx(3 / 4)
    assert report.output_tokens_per_second == pytest.approx(3 * 4 / 4)
    assert report.total_tokens_per_second == pytest.approx(3 * (4 + 8) / 4)
    assert report.ttft_ms_median == pytest.approx(1000)
    assert report.tpot_ms_median == pytest.approx(1000)
    assert report.host_fraction == pytest.approx(0.25)
    moved = 6 * weight_bytes_per_step(plan) + 3 * 4 * (8 + 2) * kv_bytes_per_token(plan)
    assert report.bandwidth_gbs == pytest.approx(moved / 4 / 1e9)
    assert report.bandwidth_fraction == pytest.approx(moved / 4 / 2e9)
