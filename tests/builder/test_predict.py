"""Predictions: what is run of a plan, what follows for the whole, and when nothing is said."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

import ingot.builder.predict as prediction
from ingot.builder.build import build
from ingot.builder.predict import Prediction, Sample, choose_sample, last_cache_bytes
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import open_engine, read_plan
from ingot.errors import CapacityError
from ingot.plan import Plan
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.cpu.target import TARGETS
from ingot.plugins.ref.target import RefTarget
from ingot.plugins.registry import find_target
from ingot.plugins.target import Target
from ingot.step_io import Int32, StepTimes
from ingot.step_work import Load
from ingot.timed_run import TimedRun, TimedStep
from tests.handmade import TINY_LLAMA, write_model

REF = find_target("ref")
native = pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of six layers; c: Checkpoint, e: Engine."""
    folder = tmp_path_factory.mktemp("predict")
    model = write_model(folder / "m", {**TINY_LLAMA, "num_hidden_layers": 6})
    convert(ConvertOptions(model_dir=model, output_dir=folder / "c"))
    build(BuildConfig(target="ref"), folder / "c", folder / "e")
    return folder


def _layers(plan: Plan) -> set[str]:
    return {step.name.split("/")[0] for step in plan.steps if "/" in step.name}


def _timed(plan: Plan, seconds: dict[str, float], outside: float) -> TimedStep:
    """Each plan step takes what the last part of its name says; the draws take 1."""
    parts = np.array([*(seconds.get(step.name.split("/")[-1], 0.0) for step in plan.steps), 1.0])
    times = StepTimes(parts=parts, variant="", barriers=0)
    load = Load(sequences=((0, 1),), logit_rows=1)
    return TimedStep(load=load, seconds=float(parts.sum() + outside), times=times, ids=np.zeros(1, np.int32))


def test_as_many_layers_are_run_as_hold_the_bytes(folder: Path) -> None:
    plan = read_plan(folder / "e")
    few, all_of_it = Sample(plan, 0, REF), Sample(plan, plan.weight_bytes, REF)
    assert _layers(few.plan) == {"layers.0", "layers.5"}  # the last layer runs for the wanted rows alone
    assert few.plan.steps[-1].name == plan.steps[-1].name == "lm_head"
    assert all_of_it.plan.steps == plan.steps
    assert few.memory < all_of_it.memory
    half = Sample(plan, plan.weight_bytes // 2, REF)
    assert len(few.plan.steps) < len(half.plan.steps) < len(plan.steps)


def test_layers_that_differ_are_all_run(folder: Path) -> None:
    plan = read_plan(folder / "e")
    steps = [
        dataclasses.replace(step, attrs={**step.attrs, "window": 7}) if step.name == "layers.3/attention" else step
        for step in plan.steps
    ]
    sample = Sample(dataclasses.replace(plan, steps=tuple(steps)), 0, REF)
    assert "layers.3/attention" in {step.name for step in sample.plan.steps}
    assert "layers.4/attention" not in {step.name for step in sample.plan.steps}


def test_layers_that_are_not_run_count_like_those_that_are(folder: Path) -> None:
    plan = read_plan(folder / "e")
    seconds = {"embed": 0.5, "qkv": 2.0, "attention": 3.0, "gate_up": 5.0, "lm_head": 7.0}
    for least in (0, plan.weight_bytes // 2, plan.weight_bytes):
        sample = Sample(plan, least, REF)
        found = sample.whole([_timed(sample.plan, seconds, 0.25) for _ in range(3)], np.mean)
        assert found == pytest.approx(0.5 + 6 * (2 + 3 + 5) + 7 + 1 + 0.25)


def test_repetitions_are_averaged_part_by_part(folder: Path) -> None:
    sample = Sample(read_plan(folder / "e"), 0, REF)
    turns = [_timed(sample.plan, {"qkv": each}, 0.0) for each in (2.0, 2.0, 50.0)]
    assert sample.whole(turns, np.median) == pytest.approx(6 * 2.0 + 1)
    assert sample.whole(turns, np.mean) == pytest.approx(6 * 18.0 + 1)


def test_lengths_keep_to_the_limits(folder: Path) -> None:
    plan = read_plan(folder / "e")
    sample = Sample(plan, 0, REF)
    assert (sample.prompt, sample.context, sample.length) == (63, 63, 64)
    short = dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, max_num_tokens=5))
    assert (Sample(short, 0, REF).prompt, Sample(short, 0, REF).context) == (5, 5)


@native
@pytest.mark.native
def test_a_sample_holds_the_weights_that_it_reads(folder: Path, tmp_path: Path) -> None:
    """Of layers that are not run nothing but zeros."""
    config = BuildConfig(precision="w4g32", activations="int8", screen_lm_head=True, autotune=False)
    build(config, folder / "c", tmp_path / "e")
    with open_engine(tmp_path / "e") as engine:
        sample = Sample(engine.plan, 0, REF)
        copy = sample.copied(tmp_path / "e/rank0.engine")
        read = {name for step in sample.plan.steps for name in step.inputs}
        for weight in engine.plan.weights:
            first = weight.pieces[0].offset
            assert len(weight.pieces) == 1
            place = slice(first, first + weight.nbytes)
            np.testing.assert_array_equal(copy[place], engine.weights[place] if weight.name in read else 0)
        assert len(read & {weight.name for weight in engine.plan.weights}) < len(engine.plan.weights)
        assert engine.plan.steps[-1].op == "screened_matmul"


@native
@pytest.mark.native
def test_a_build_predicts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "SMALL", 0)
    report = build(BuildConfig(), folder / "c", tmp_path / "e")
    found = report.prediction
    assert found is not None
    assert found.decode > 0
    assert found.prefill > 0
    assert (found.context, found.prompt) == (63, 63)
    assert str(found).startswith("predicted for this machine: ")
    assert not any("predicted" in note for note in report.notes)


@pytest.mark.slow
def test_where_there_is_no_prediction_the_build_says_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_plan(folder / "e")
    assert choose_sample(plan, RefTarget(), None) == "no speed is predicted for ref"
    if detect_isa() == "none":
        return
    target = find_target("cpu")
    assert "the model is too small" in str(choose_sample(plan, target, None))
    monkeypatch.setattr(prediction, "SMALL", 0)
    assert "--max_mem" in str(choose_sample(plan, target, 1 << 20))
    assert isinstance(choose_sample(plan, target, 1 << 40), Sample)
    absent = [each for each in TARGETS if each.run_blocker() is not None]
    for each in absent:
        assert f"no speed is predicted: {each.name} needs" in str(choose_sample(plan, each, None))
        report = build(BuildConfig(target=each.name), folder / "c", tmp_path / "other")
        assert report.prediction is None
        told = [note for note in report.notes if each.name in note]
        assert len(told) == 1, "once, though nothing is timed and no speed is predicted"
        assert "ingot bench kernels" in told[0]
    for quiet in (BuildConfig(autotune=False), BuildConfig(dry_run=True)):
        report = build(quiet, folder / "c", tmp_path / "quiet")
        assert report.prediction is None
        assert not any("predicted" in note for note in report.notes)


@native
@pytest.mark.native
def test_a_copy_that_memory_has_no_place_for_costs_the_prediction_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> None:
        raise CapacityError("the weights cannot be copied: too little address space")

    monkeypatch.setattr(prediction, "SMALL", 0)
    monkeypatch.setattr(prediction, "huge_pages", refuse)
    monkeypatch.setattr("ingot.plugins.cpu.target.offers_huge_pages", lambda: True)
    report = build(BuildConfig(), folder / "c", tmp_path / "e")
    assert report.prediction is None
    assert any("no speed is predicted: the weights cannot be copied" in note for note in report.notes)
    open_engine(tmp_path / "e").close()


class KnownRun(TimedRun):
    """A run without a session: of prompts and decode steps lm_head takes known seconds, and one more lies outside."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._prompts = itertools.chain([99.0], itertools.cycle([8.0, 2.0, 3.0]))
        self._decodes = itertools.chain([99.0], itertools.cycle([1.0, 3.0]))
        self.pasts: set[int] = set()

    def prefill(self, ids: Int32, sequence: int = 0) -> list[TimedStep]:
        return [_timed(self._plan, {"lm_head": next(self._prompts)}, 1.0)]

    def decode(self, ids: Int32, past: int) -> TimedStep:
        self.pasts.add(past)
        return _timed(self._plan, {"lm_head": next(self._decodes)}, 1.0)


def test_what_is_measured_becomes_tokens_per_second(folder: Path) -> None:
    """Prompts of 8 and 2 seconds, their median 5; decode steps of 1 and 3, their mean 2; draws and outside 1 each."""
    sample = Sample(read_plan(folder / "e"), 0, REF)
    run = KnownRun(sample.plan)
    found = prediction._measure(sample, run)
    assert (found.context, found.prompt, run.pasts) == (63, 63, {63})
    assert found.prefill == pytest.approx(63 / (5 + 2))
    assert found.decode == pytest.approx(1 / (2 + 2))


def test_a_sample_takes_the_room_that_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "SMALL", 0)
    asked: list[int] = []
    monkeypatch.setattr(prediction, "last_cache_bytes", lambda: 40 << 20)

    def small_sample(plan: Plan, least: int, target: Target) -> Sample:
        asked.append(least)
        return Sample(plan, 0, target)

    monkeypatch.setattr(prediction, "Sample", small_sample)
    plan, target = read_plan(folder / "e"), TARGETS[0]
    monkeypatch.setattr(type(target), "run_blocker", lambda self: None)
    memory = Sample(plan, 0, REF).memory
    assert isinstance(choose_sample(plan, target, memory), Sample)
    assert "more than --max_mem leaves" in str(choose_sample(plan, target, memory - 1))
    monkeypatch.setattr(prediction, "last_cache_bytes", lambda: 0)
    choose_sample(plan, target, None)
    assert asked == [80 << 20, 80 << 20, 64 << 20]


def test_words() -> None:
    words = str(Prediction(context=128, decode=12.34, prompt=512, prefill=1234.5))
    assert words.startswith("predicted for this machine: 12.3 tokens/s for one sequence after 128 tokens, ")
    assert words.endswith(", 1,234.5 tokens/s in a prompt of 512")
    assert last_cache_bytes() >= 0
