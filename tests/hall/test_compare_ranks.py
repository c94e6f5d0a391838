"""`verify --against` of engines of several ranks: sound ones agree, an error in one rank is named with its number."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot.plugins.ref.ranks
from ingot.builder.build import build
from ingot.compare.compare import CompareOptions, compare
from ingot.compare.rank_processes import RankProcesses
from ingot.compare.ranks import join_stages
from ingot.configs.build import BuildConfig
from ingot.convert.family import find_family
from ingot.engine import open_engine, read_plan
from ingot.errors import EngineError, RankError
from ingot.fixed_tables import blocks_needed, fixed_tables
from ingot.plan import Plan, Step
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch
from tests.e2e.same_bits import random_checkpoint
from tests.e2e.test_pipeline_parallel import MODELS
from tests.hall.planted import Bytes, panel, replant, with_attr

OPTIONS = CompareOptions(tokens=24, threads=1)
SMALL = {**MODELS["llama"], "num_hidden_layers": 2}


def made(folder: Path, name: str = "llama") -> Path:
    shape = SMALL if name == "llama" else MODELS[name]
    return random_checkpoint(folder, {**find_family(name).tiny, **shape})


def built(folder: Path, checkpoint: Path, layout: tuple[int, int], target: str = "ref", precision: str = "f32") -> Path:
    engine = folder / f"{target.replace('/', '-')}-{precision}-{layout[0]}-{layout[1]}"
    if not engine.exists():
        tp, pp = layout
        config = BuildConfig(
            target=target, precision=precision, tp_size=tp, pp_size=pp, tokens_per_block=16, max_num_tokens=16
        )
        build(dataclasses.replace(config, autotune=False), checkpoint, engine)
    return engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    """Of two stages of two ranks."""
    return built(checkpoint.parent, checkpoint, (2, 2))


def test_a_sound_engine_of_four_ranks(engine: Path, checkpoint: Path) -> None:
    comparison = compare(engine, checkpoint, OPTIONS)
    comparison.raise_if_wrong()
    assert comparison.logits.positions == 24
    assert (comparison.logits.kl_mean or 0) < 1e-9
    compared = {step.name: step for step in comparison.steps}
    assert {"layers.1/down.part0", "layers.1/down.part1", "layers.1/down.all_reduce", "stage1.recv0"} <= set(compared)
    assert compared["layers.1/down.part0"].model_error is None, "a part is no value of the source"
    assert compared["layers.1/down.all_reduce"].model_error is not None
    assert compared["lm_head.all_gather"].model_error is not None


def test_ranks_that_divide_columns_by_groups(tmp_path: Path) -> None:
    """Of 96 columns in groups of 32, one rank has two groups and the other one has the third."""
    checkpoint = random_checkpoint(tmp_path, {**find_family("llama").tiny, **SMALL, "intermediate_size": 96})
    engine = built(tmp_path, checkpoint, (2, 1), precision="w4g32")
    shapes = {weight.name: weight.shape for weight in read_plan(engine).weights}
    assert shapes["layers.0/down.part0.weight"][1] == 64
    compare(engine, checkpoint, OPTIONS).raise_if_wrong()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "precision", "layout"),
    [
        ("llama", "cpu", "w8", (2, 2)),
        ("llama", "cpu", "bf16", (4, 1)),
        ("mixtral", "cpu", "w4g32", (2, 1)),
        ("mixtral", "ref", "w8", (2, 1)),
        ("gemma3_text", "cpu", "bf16", (1, 2)),  # tied, two cache groups
        ("qwen3_5_text", "cpu", "f32", (1, 2)),  # states
        ("falcon_h1", "ref", "f32", (1, 2)),  # states beside attention in each layer: layers are numbered twice
        ("gpt2", "cpu", "f32", (2, 2)),
    ],
)
def test_sound_engines(name: str, target: str, precision: str, layout: tuple[int, int], tmp_path: Path) -> None:
    checkpoint = made(tmp_path, name)
    engine = built(tmp_path, checkpoint, layout, target, precision)
    comparison = compare(engine, checkpoint, OPTIONS)
    comparison.raise_if_wrong()
    assert comparison.logits.positions == 24


@pytest.mark.parametrize(
    ("rank", "weight"),
    [(1, "layers.1/down.part1.weight"), pytest.param(3, "layers.0/attention_out.part1.weight", marks=pytest.mark.slow)],
)
def test_a_wrong_weight_is_named_with_its_rank(
    rank: int, weight: str, engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    def zeros(plan: Plan, section: Bytes) -> None:
        panel(plan, section, weight, 16)[:] = 0

    wrong = compare(replant(engine, tmp_path / "e", zeros, rank), checkpoint, OPTIONS)
    assert [each.step for each in wrong.findings] == [weight.removesuffix(".weight")], "what follows is right by itself"
    with pytest.raises(EngineError, match=rf"rank {rank}: weight {weight}, row \d+, column"):
        wrong.raise_if_wrong()


@pytest.mark.slow
def test_a_sum_that_one_rank_has_otherwise(engine: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is wrong, and the ranks differ, by one bit."""
    right: Callable[..., None] = ingot.plugins.ref.ranks._compute

    def compute(steps: Sequence[Step], ranks: Sequence[Any], sent: Any) -> None:
        right(steps, ranks, sent)
        if steps[0].name == "layers.0/down.all_reduce":
            name = steps[1].outputs[0]
            ranks[1][1].update({name: ranks[1][1][name] * (1 + 2.0**-23)})

    monkeypatch.setattr(ingot.plugins.ref.ranks, "_compute", compute)
    found = [each for each in compare(engine, checkpoint, OPTIONS).findings if each.step == "layers.0/down.all_reduce"]
    assert found[0].what.startswith("rank 1: output of kernel all_reduce.f32.ref")
    assert found[1].expected.endswith("what rank 0 has")
    assert found[0].got not in found[0].expected


@pytest.mark.slow
def test_rows_that_a_stage_gets_otherwise(engine: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., None] = ingot.plugins.ref.ranks._compute

    def compute(steps: Sequence[Step], ranks: Sequence[Any], sent: Any) -> None:
        right(steps, ranks, sent)
        if steps[0].op == "recv":
            name = steps[0].outputs[0]
            ranks[0][1].update({name: ranks[0][1][name] + 1})

    monkeypatch.setattr(ingot.plugins.ref.ranks, "_compute", compute)
    found = compare(engine, checkpoint, OPTIONS).findings
    assert found[0].step == "stage1.recv0"
    assert found[0].what.startswith("rank 0: output of kernel recv.f32.ref, token 0, column 0")


def test_an_attribute_of_one_stage(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    def other(plan: Plan, section: Bytes) -> Plan:
        return with_attr(plan, "layers.1/attention", scale=0.5)

    with pytest.raises(EngineError, match=r"kernel call layers\.1/attention: attrs"):
        compare(replant(engine, tmp_path / "e", other), checkpoint, OPTIONS)


@pytest.mark.slow
def test_another_model_is_refused(engine: Path, tmp_path: Path) -> None:
    other = random_checkpoint(tmp_path, {**find_family("llama").tiny, **MODELS["llama"]})
    with pytest.raises(EngineError, match=r"was not built from this source(.|\n)*num_layers"):
        compare(engine, other, OPTIONS)


def test_stages_that_are_joined_have_the_layers_of_the_model(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    whole = read_plan(built(checkpoint.parent, checkpoint, (2, 1)), rank=1)
    joined = join_stages([read_plan(engine, 3), read_plan(engine, 1)], whole).plan
    assert {step.name: step.attrs.get("layer") for step in joined.steps} == {
        step.name: step.attrs.get("layer") for step in whole.steps
    }
    assert joined.caches == whole.caches
    outputs = [name for step in joined.steps for name in step.outputs if name]
    assert joined.logits in outputs
    assert set(outputs) <= {buffer.name for buffer in joined.buffers}


@pytest.mark.slow
def test_a_process_that_ends(checkpoint: Path) -> None:
    """It is named, and the comparison ends."""
    path = built(checkpoint.parent, checkpoint, (2, 1), "cpu", "bf16")
    target: Any = find_target(read_target(path))
    with open_engine(path) as opened:
        plan = opened.plan
        blocks = blocks_needed(plan, sequences=1, length=2)
        session = RankProcesses(target, opened, SessionOptions(num_blocks=blocks))
        batch = StepBatch(
            ids=np.array([1, 2], np.int32),
            query_starts=np.array([0, 2], np.int32),
            past_lengths=np.zeros(1, np.int32),
            block_tables=fixed_tables(plan, sequences=1, length=2),
            logit_rows=np.array([0, 1], np.int32),
            slots=np.full(1, -1, np.int32),
            draws=np.empty(0, np.int32),
            want_logits=True,
        )
        first, second = session.run_ranks_tapped(batch, [["layers.0/down.all_reduce"]] * 2)
        assert [*first] == [*second] == ["layers.0/down.all_reduce"]
        session._processes[0].kill()
        session._processes[0].wait()
        with pytest.raises((RankError, BrokenPipeError)):
            session.run_ranks_tapped(batch, [[], []])
        session.close()


def read_target(engine: Path) -> str:
    with open_engine(engine) as opened:
        return opened.manifest.target
