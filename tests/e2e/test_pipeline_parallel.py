"""Engines whose layers are divided among pipeline stages: the bits of one rank, wherever a model is cut."""

import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.family import find_family
from ingot.engine import open_engine, read_manifest, read_plan
from ingot.errors import EngineError, RankError, UsageError
from ingot.inspect import inspect
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.runtime import ModelRunner
from tests.e2e.command import ingot
from tests.e2e.same_bits import random_checkpoint
from tests.e2e.test_quantised import bits
from tests.e2e.test_sum_parts import SHAPE
from tests.runtime.rank_processes import RankProcesses

PROMPTS = [np.random.default_rng(length).integers(0, 61, length).tolist() for length in (1, 18)]
HYBRID = {"num_hidden_layers": 6, "full_attention_interval": 3}
WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "num_key_value_heads": 2, "num_hidden_layers": 4},
    "gemma3_text": {**SHAPE, **WINDOWS, "num_key_value_heads": 2, "vocab_size": 61},  # tied, two cache groups
    "mixtral": {**SHAPE, "num_key_value_heads": 2},
    "gpt2": {"n_head": 4, "n_layer": 4},  # tied, learnt positions
    "qwen3_5_text": HYBRID,  # states
    "deepseek_v3": {},  # latents
    "falcon_h1": {},  # states beside attention in each layer
    "nanochat": {},  # ones that norms of all stages share
    "olmo2": {},  # norms over all heads, which --tp_size refuses
}
LAYOUTS = {"llama": ((1, 2), (1, 4), (2, 2)), "gpt2": ((2, 2),)}
CASES = [
    ("llama", "f32", "auto"),
    pytest.param("gpt2", "f32", "auto", marks=pytest.mark.slow),
    pytest.param("llama", "w4g32", "int8", marks=pytest.mark.slow),
    ("gemma3_text", "bf16", "auto"),
    ("mixtral", "w8", "int8"),
    ("qwen3_5_text", "f32", "auto"),
    ("deepseek_v3", "f32", "auto"),
    ("falcon_h1", "f32", "auto"),
    ("olmo2", "w8", "int8"),
    ("nanochat", "bf16", "auto"),
]


def made(folder: Path, name: str) -> Path:
    return random_checkpoint(folder, {**find_family(name).tiny, **MODELS[name]})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("stages"), "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    build(BuildConfig(target="ref", tp_size=2, pp_size=2), checkpoint, checkpoint.parent / "e")
    return checkpoint.parent / "e"


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses(3)
    yield made
    made.close()


@pytest.mark.daily(1)
@pytest.mark.parametrize(("name", "precision", "activations"), CASES)
def test_any_cut_gives_the_same_bits(
    name: str, precision: str, activations: str, tmp_path: Path, processes: RankProcesses
) -> None:
    """Alone, in chunks, after a prefix hit."""
    checkpoint, layouts = made(tmp_path, name), LAYOUTS.get(name, ((1, 2),))
    parts = 2 if any(tp > 1 for tp, _ in layouts) else None
    config = BuildConfig(
        target="cpu", precision=precision, activations=activations, sum_parts=parts, tokens_per_block=16, autotune=False
    )
    build(config, checkpoint, tmp_path / "whole")
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected = bits(runner, PROMPTS)
    for tp, pp in layouts:
        build(dataclasses.replace(config, tp_size=tp, pp_size=pp), checkpoint, tmp_path / "e")
        with processes.runner(tmp_path / "e", tp * pp) as runner:
            assert bits(runner, PROMPTS) == expected
            assert bits(runner, PROMPTS) == expected, "now the cache has the prompts"
        assert processes.said == [None] * (tp * pp - 1)
    small = RuntimeConfig(max_num_tokens=7, rank_timeout=20, threads=2)
    with processes.runner(tmp_path / "e", tp * pp, small) as runner:
        assert bits(runner, PROMPTS) == expected


@pytest.mark.daily(1)
@pytest.mark.parametrize(("name", "precision", "activations"), CASES[:1] + CASES[3:7])
def test_the_reference_computes_all_stages(name: str, precision: str, activations: str, tmp_path: Path) -> None:
    checkpoint = made(tmp_path, name)
    config = BuildConfig(target="ref", precision=precision, activations=activations, tokens_per_block=16)
    found = []
    for stages in (1, 2):
        build(dataclasses.replace(config, pp_size=stages), checkpoint, tmp_path / f"e{stages}")
        with ModelRunner.from_dir(tmp_path / f"e{stages}") as runner:
            found.append(bits(runner, PROMPTS))
    assert found[0] == found[1]


@pytest.mark.slow
def test_ranks_hold_their_layers(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    build(BuildConfig(target="ref", sum_parts=2), checkpoint, tmp_path / "whole")
    whole = read_plan(tmp_path / "whole")
    plans = [read_plan(engine, rank) for rank in range(4)]
    assert [plan.stage for plan in plans] == [(1, 2), (1, 2), (0, 2), (0, 2)], "rank 0 has the logits"
    assert sum(plan.num_layers for plan in plans[::2]) == whole.num_layers
    assert all(plan.caches[0].kv_heads == 1 for plan in plans)
    held = [plan.weight_bytes for plan in plans]
    assert max(held) < 0.4 * whole.weight_bytes
    assert {"embedding"} == {step.op for step in plans[2].steps} - {step.op for step in plans[0].steps} - {"send"}
    manifest = read_manifest(engine)
    assert (manifest.ranks, manifest.model["pp_size"], manifest.model["tp_size"]) == (4, 2, 2)
    document = json.loads(inspect(engine).to_json())
    assert [(each["stage"], each["tp_rank"], each["weight_bytes"]) for each in document["ranks"]] == [
        (1, 0, held[0]),
        (1, 1, held[1]),
        (0, 0, held[2]),
        (0, 1, held[3]),
    ]
    assert "rank3.engine: stage 0 of 2, rank 1 of it, " in inspect(engine).summary


def test_a_tied_table_is_in_both_stages(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, "gpt2")
    build(BuildConfig(target="ref", pp_size=2), checkpoint, tmp_path / "e")
    shapes = [{weight.shape for weight in read_plan(tmp_path / "e", rank).weights} for rank in range(2)]
    table = read_plan(tmp_path / "e").vocab_size
    assert all(any(shape[0] == table for shape in each) for each in shapes)


def test_the_same_bytes_every_time(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    build(BuildConfig(target="ref", tp_size=2, pp_size=2), checkpoint, tmp_path / "e")
    for path in engine.iterdir():
        assert path.read_bytes() == (tmp_path / "e" / path.name).read_bytes()


def test_damage(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "missing")
    (tmp_path / "missing" / "rank3.engine").unlink()
    with pytest.raises(EngineError, match=r"missing(.|\n)*rank3\.engine"):
        ModelRunner.from_dir(tmp_path / "missing")
    with open_engine(engine, rank=2) as opened, pytest.raises(EngineError, match=r"2 pipeline stages.*and 1 are here"):
        RefSession(opened.plan, opened.weights, SessionOptions(num_blocks=(4,)), ranks=2)
    target: Any = find_target("ref")
    with open_engine(engine) as last, open_engine(engine, rank=2) as first:
        plans, weights = [first.plan, last.plan], [first.weights, last.weights]
        with pytest.raises(EngineError, match=r"do not belong together(.|\n)*stage 1 of 2"):
            target.open_ranks(plans, weights, SessionOptions(num_blocks=(4,)))


def test_refused_layouts(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--pp_size 5 is too large(.|\n)*--pp_size 4: each stage must have a layer"):
        build(BuildConfig(target="ref", pp_size=5), checkpoint, tmp_path / "e")
    with pytest.raises(UsageError, match=r"pp_size 33 is out of range(.|\n)*1 to 32"):
        BuildConfig(tp_size=2, pp_size=33)
    assert BuildConfig(pp_size=2, screen_lm_head=True).ranks == 2
    args = ("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", "--pp_size", 2)
    ingot("build", *args, "--target", "tensorrt/sm90").fails("--pp_size 2 is not supported on tensorrt/sm90", code=2)
    ingot("build", *args, "--target", "ref", "--refit").fails("--refit cannot be combined", code=2)
    ingot("build", *args, "--target", "ref").succeeds()
    assert "all hashes match" in ingot("verify", tmp_path / "e").succeeds().out


@pytest.fixture(scope="module")
def cpu_engine(checkpoint: Path) -> Path:
    config = BuildConfig(target="cpu", precision="f32", tokens_per_block=16, autotune=False)
    build(config, checkpoint, checkpoint.parent / "alone")
    build(dataclasses.replace(config, pp_size=2), checkpoint, checkpoint.parent / "two")
    return checkpoint.parent / "two"


def test_stages_compute_several_steps_at_once(cpu_engine: Path, processes: RankProcesses) -> None:
    """Also where requests are preempted, and where one leaves."""
    random = np.random.default_rng(4)
    prompts = [random.integers(0, 61, length).tolist() for length in (1, 20, 17, 5, 13)]
    with ModelRunner.from_dir(cpu_engine.with_name("alone")) as runner:
        expected = bits(runner, prompts, 40)
    with processes.runner(cpu_engine, 2) as runner:
        assert bits(runner, prompts, 40) == expected
        work = runner.executor.work()
        assert work.overlapped > work.steps // 2
    block = max(read_plan(cpu_engine, rank).block_bytes for rank in range(2))
    with processes.runner(cpu_engine, 2, RuntimeConfig(rank_timeout=20, kv_cache_memory=2 * 8 * block)) as runner:
        assert bits(runner, prompts, 40) == expected
        assert runner.stats()["preemptions"] > 0
        stream = runner.generate(prompts[:3], max_new_tokens=30, end_id=-1, streaming=True)
        next(stream)
        stream.close()
        assert bits(runner, prompts, 40) == expected
    assert processes.said == [None]


@pytest.mark.slow
def test_a_stage_that_is_stopped(cpu_engine: Path, pair: RankProcesses) -> None:
    pid = pair.processes[0].pid
    assert pid is not None
    with pair.runner(cpu_engine, 2, RuntimeConfig(rank_timeout=1)) as runner:
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 did not come to stage1\.recv0 of step 1: rank 0 waited 1 s"):
            runner.generate(PROMPTS, max_new_tokens=4)
        assert time.monotonic() - began < 10
        os.kill(pid, signal.SIGCONT)
    assert "rank 1 did not come" in str(pair.said[0])


@pytest.mark.slow
def test_a_stage_that_is_slow(cpu_engine: Path, pair: RankProcesses) -> None:
    """Longer than --rank_timeout, but it computes."""
    with pair.runner(cpu_engine, 2) as runner:
        expected = runner.generate(PROMPTS, max_new_tokens=2, end_id=-1).tolist()
    with pair.runner(cpu_engine, 2, RuntimeConfig(rank_timeout=0.5), delay=0.1) as runner:
        began = time.monotonic()
        assert runner.generate(PROMPTS, max_new_tokens=2, end_id=-1).tolist() == expected
        assert time.monotonic() - began > 2


@pytest.mark.slow
def test_a_stage_that_is_killed(cpu_engine: Path, pair: RankProcesses) -> None:
    pid = pair.processes[0].pid
    assert pid is not None
    with pair.runner(cpu_engine, 2) as runner:
        runner.generate(PROMPTS, max_new_tokens=2)
        pair.session.native.set_step_delay(0.002)
        stream = runner.generate(PROMPTS, max_new_tokens=20, end_id=-1, streaming=True)
        next(stream)
        os.kill(pid, signal.SIGKILL)
        pair.processes[0].join()
        with pytest.raises(RankError, match="rank 1 has ended"):
            list(stream)
        assert "rank 1 has ended" in str(runner.executor.failure)
    assert pair.said == ["it has ended"]


@pytest.mark.slow
def test_stages_that_cannot_open(cpu_engine: Path, tmp_path: Path, processes: RankProcesses) -> None:
    shutil.copytree(cpu_engine, tmp_path / "missing")
    (tmp_path / "missing" / "rank1.engine").unlink()
    with pytest.raises(RankError, match=r"rank1\.engine"), processes.runner(cpu_engine, 2, others=tmp_path / "missing"):
        pass
    assert "rank1.engine" in str(processes.said[0])
    with pytest.raises(UsageError, match=r"2 ranks(.|\n)*mpirun -n 2"):
        ModelRunner.from_dir(cpu_engine)


@pytest.fixture
def pair() -> Iterator[RankProcesses]:
    made = RankProcesses(1)
    yield made
    made.close()
