"""`ingot bench kernels`: every op is there, times add up, bounds and limits follow from the figures."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ingot.bench import kernels
from ingot.bench.kernels import KernelsOptions, Phase, fastest_quarter, op_name, summarise
from ingot.engine import read_plan
from ingot.plan import Call, Plan, Variant
from ingot.plugins.cpu.native import detect_isa, peak_name
from ingot.plugins.plan_work import PlanWork
from ingot.step_io import StepTimes
from ingot.step_work import Load
from ingot.timed_run import TimedStep
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model

native = pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")
SHORT = ("--repetitions", 2, "--input_len", 20, "--json", "--log_level", "warning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c: Checkpoint of a tiny llama; e: Engine with int8 products; r: Engine for ref."""
    folder = tmp_path_factory.mktemp("kernels")
    ingot("convert", "--model_dir", write_model(folder / "m", TINY_LLAMA), "--output_dir", folder / "c").succeeds()
    build = ("build", "--checkpoint_dir", folder / "c", "--max_batch_size", 8)
    ingot(*build, "--output_dir", folder / "r", "--target", "ref").succeeds()
    if detect_isa() != "none":
        quantised = ("--precision", "w8", "--activations", "int8", "--target", "cpu/avx2")
        ingot(*build, "--output_dir", folder / "e", *quantised).succeeds()
    return folder


@pytest.mark.slow
@native
@pytest.mark.native
def test_a_report_holds_every_op_and_its_times_add_up(folder: Path) -> None:
    document = json.loads(ingot("bench", "kernels", "--engine_dir", folder / "e", *SHORT).succeeds().out)
    names = [phase["name"] for phase in document["phases"]]
    assert names == [
        "prefill of 20 tokens",
        "decode of 1 sequence after 20 tokens",
        "decode of 8 sequences after 20 tokens",
    ]
    assert document["notes"] == ["32 sequences are left out: the engine decodes at most 8 at once"]
    plan = read_plan(folder / "e")
    barriers = 6 * 2 + 4  # of layers, and of embedding, rows of logits, last norm and lm_head
    for phase in document["phases"]:
        ops = phase["ops"]
        assert {op["name"] for op in ops} == {op_name(step) for step in plan.steps} | {"sampling"}
        assert sum(op["calls"] for op in ops) == len(plan.steps) + 1
        parts = sum(op["seconds"] for op in ops)
        assert parts + phase["outside_seconds"] == pytest.approx(phase["seconds"])
        assert phase["outside_seconds"] >= 0
        assert phase["barriers"] == barriers
        assert phase["variants"] == ["few"]
        assert phase["barrier_seconds"] > 0
        assert phase["tokens_per_second"] == pytest.approx(phase["tokens"] / phase["seconds"])
        assert set(phase["peaks"]) == {"f32.avx2", "int8.avx2"}
        for op in ops:
            assert op["seconds"] > 0
            memory = op["nbytes"] / phase["machine_gbs"] / 1e9
            arithmetic = math.inf if op["name"] == "sampling" else phase["peaks"][peak_name(op["kernel"])]
            compute = op["operations"] / arithmetic
            assert op["bound"] == ("compute" if compute > memory else "memory")
            assert max(memory, compute) <= op["limit_seconds"] * (1 + 1e-9)
            assert op["limit_seconds"] <= (memory + compute) * (1 + 1e-9)
            assert op["fraction_of_limit"] == pytest.approx(op["limit_seconds"] / op["seconds"])


@native
@pytest.mark.native
def test_a_table_for_people(folder: Path) -> None:
    args = ("--engine_dir", folder / "e", "--batch_size", 2, "--context", 7, *SHORT)
    out = ingot("bench", "kernels", *[arg for arg in args if arg != "--json"]).succeeds().out
    assert "w8 for cpu/avx2, KV cache in bf16" in out
    for words in ("decode of 2 sequences after 7 tokens", "gate_up", "matmul.w8a8 ", "outside", "GB/s", "int8.avx2"):
        assert words in out
    assert "decode of 1 sequence" not in out
    table = [line for line in out.splitlines() if line.startswith(("op ", "gate_up", "sampling"))]
    assert max(map(len, table)) <= 80
    whole = ingot("bench", "kernels", *[arg for arg in args if arg != "--json"], "--all").succeeds().out
    assert "matmul.w8a8.avx2" in whole
    assert "limit ms" in whole


@native
@pytest.mark.native
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batch_size", 9], ["--batch_size", "at most 8", "9"]),
        (["--batch_size", 64], ["--max_batch_size"]),
        (["--input_len", 65], ["--input_len", "at most"]),
        (["--input_len", 8, "--context", 9], ["--context", "at most 8"]),
        (["--input_len", 64, "--context", 63], ["lower --context or --repetitions"]),
    ],
)
def test_what_the_engine_cannot_hold_is_refused(folder: Path, args: list[object], words: list[str]) -> None:
    code = 2
    ingot("bench", "kernels", "--engine_dir", folder / "e", *args).fails(*words, code=code)


def test_engines_that_do_not_tell_are_refused(folder: Path) -> None:
    ingot("bench", "kernels", "--engine_dir", folder / "r").fails("supports CPU targets only", "--target cpu")


def test_no_engine_is_refused(tmp_path: Path) -> None:
    ingot("bench", "kernels", "--engine_dir", tmp_path / "none").fails("none", code=2)


def _turn(plan: Plan, seconds: float, context: int = 9, variant: str = "") -> list[TimedStep]:
    """A decode step whose parts take 1, 2, 3, ... shares."""
    shares = np.arange(1, len(plan.steps) + 2, dtype=np.float64)
    parts = 0.8 * seconds * shares / shares.sum()
    times = StepTimes(parts=parts, variant=variant, barriers=7)
    load = Load(sequences=((context, 1),), logit_rows=1)
    return [TimedStep(load=load, seconds=seconds, times=times, ids=np.zeros(1, np.int32))]


def _inside(plan: Plan, op: str, names: Sequence[str], called: Sequence[str] = ()) -> Plan:
    """The plan with a variant v: these steps are computed by some call of the op; beside the others run `called`."""
    some = next(step.name for step in plan.steps if step.op == op)
    calls = tuple(
        Call(step=step.name, inside=tuple(names) if step.name == some else ())
        for step in plan.steps
        if step.name not in names or step.name in called
    )
    variant = Variant(name="v", most_tokens=plan.limits.max_num_tokens, calls=calls)
    return dataclasses.replace(plan, variants=(variant,))


def test_the_fastest_quarter(folder: Path) -> None:
    plan = read_plan(folder / "r")
    turns = [_turn(plan, seconds) for seconds in (5.0, 1.0, 2.0, 3.0, 400.0)]
    assert [turn[0].seconds for turn in fastest_quarter(turns)] == [1.0, 2.0]
    assert [turn[0].seconds for turn in fastest_quarter(turns[:2])] == [1.0]
    phase = summarise(plan, PlanWork(plan), "decode", turns, {"": 1e9, **dict.fromkeys(_peaks(plan), 1e9)}, 1e-6)
    assert (phase.seconds, phase.median_seconds, phase.repetitions) == (1.5, 3.0, 5)
    assert phase.barriers == 7
    assert phase.barrier_seconds == pytest.approx(7e-6)


def _peaks(plan: Plan) -> set[str]:
    return {peak_name(step.kernel) for step in plan.steps}


def test_a_norm_that_a_product_computes_is_no_call(folder: Path) -> None:
    plan = read_plan(folder / "r")
    norms = [step.name for step in plan.steps if step.op == "rms_norm"]
    limits = {"": 1e9, **dict.fromkeys(_peaks(plan), 1e9)}
    for folded, calls in ((norms[:0], len(norms)), (norms[:-1], 1)):
        changed = _inside(plan, "matmul", folded)
        phase = summarise(changed, PlanWork(plan), "", [_turn(plan, 1.0, variant="v")], limits, 1e-6)
        assert next(op.calls for op in phase.ops if op.name == "rms_norm") == calls
    phase = summarise(_inside(plan, "matmul", norms), PlanWork(plan), "", [_turn(plan, 1.0, variant="v")], limits, 1e-6)
    assert "rms_norm" not in {op.name for op in phase.ops}


def test_queries_that_attention_rotates_are_counted_there_alone(folder: Path) -> None:
    plan = read_plan(folder / "r")
    writes = [step for step in plan.steps if step.op == "rope_kv_write"]
    limits, found = {"": 1e9, **dict.fromkeys(_peaks(plan), 1e9)}, []
    for rotated in ([], [step.name for step in writes]):
        changed = _inside(plan, "paged_attention", rotated, called=rotated)
        phase = summarise(changed, PlanWork(plan), "", [_turn(plan, 1.0, variant="v")], limits, 1e-6)
        found.append({op.name: op.nbytes for op in phase.ops})
    queries = writes[0].outputs[0]
    cols = next(buffer.cols for buffer in plan.buffers if buffer.name == queries)
    assert found[0].pop("rope_kv_write") - found[1].pop("rope_kv_write") == len(writes) * 2 * 4 * cols
    assert found[0] == found[1]


def test_limits_and_bounds_follow_from_bytes_and_operations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.bench.kernels.peak_name", lambda kernel: "all")
    plan = read_plan(folder / "r")

    def phase(gbs: float, peak: float) -> Phase:
        turns = [_turn(plan, 2.0), _turn(plan, 3.0)]
        return summarise(plan, PlanWork(plan), "decode", turns, {"": gbs, "all": peak}, 1e-6)

    slow_memory, slow_arithmetic = phase(1e3, 1e12), phase(1e12, 1e3)
    assert (slow_memory.seconds, slow_memory.repetitions) == (2.0, 2)
    assert slow_memory.outside_seconds == pytest.approx(0.4)
    assert {op.bound for op in slow_memory.ops} == {"memory"}
    computed = {op.name: op for op in slow_arithmetic.ops if op.operations and op.name != "sampling"}
    assert {op.bound for op in computed.values()} == {"compute"}
    head = computed["lm_head"]
    assert head.limit_seconds == pytest.approx(2 * 61 * 32 / 1e3)
    gate_up = next(op for op in slow_memory.ops if op.name == "gate_up")
    assert gate_up.calls == 2
    assert gate_up.limit_seconds == pytest.approx(2 * 4 * (96 * 32 + 32 + 44) / 1e3)
    assert slow_memory.fraction_of_limit == pytest.approx(sum(op.limit_seconds for op in slow_memory.ops) / 2.0)
    assert sum(op.share for op in slow_memory.ops) == pytest.approx(0.8)


def test_limits_are_those_before_and_after_a_phase(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine reads 1, then 3, then 7 GB/s: the phases between lie at 2 and 5."""
    plan, speeds = read_plan(folder / "r"), iter((1e9, 3e9, 7e9))
    monkeypatch.setattr(kernels, "read_bandwidth", lambda *_: next(speeds))
    monkeypatch.setattr(kernels, "peak_flops", lambda name, threads: 1e9)
    monkeypatch.setattr(kernels, "barrier_seconds", lambda threads: 1e-6)
    measure = kernels._Measure(plan, KernelsOptions(engine_dir=folder, repetitions=2, threads=1), lambda *_: None)
    turns: list[int] = []

    def run(turn: int) -> list[TimedStep]:
        turns.append(turn)
        return _turn(plan, 0.75)

    phases = [measure.phase("p", run, most) for most in (5, 1)]
    assert [phase.machine_gbs for phase in phases] == [2, 5]
    assert turns == [0, 1, 2, 0, 1], "once untimed; then twice, which took long enough, or as often as there is room"
    assert [phase.repetitions for phase in phases] == [2, 1]
