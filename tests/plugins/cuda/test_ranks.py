"""Engines of several ranks on emulated GPUs, in a process each: the bits of one rank, and what a lost rank does."""

import ctypes
import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.builder.passes.split_contexts import split_contexts
from ingot.configs.build import BuildConfig
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import read_plan
from ingot.errors import BuildError, CapacityError, EngineError, RankError, TargetError
from ingot.plugins.cuda import exchanges, nccl
from ingot.plugins.cuda.nccl import require_nccl
from ingot.plugins.cuda.rank_session import CudaRankSession
from ingot.plugins.cuda.shapes import split_rules
from ingot.plugins.cuda.target import CudaTarget
from ingot.plugins.registry import find_target
from ingot.plugins.target import EnginePart, SessionOptions
from ingot.runtime import ModelRunner
from ingot.step_io import StepBatch
from tests.e2e.same_bits import random_checkpoint
from tests.plugins.cuda.emulation import Emulation
from tests.plugins.cuda.gpu_ranks import GPUS, MANY, take_emulation
from tests.runtime.rank_processes import RankProcesses

# Heads of 16 dims: each size is compiled.
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4, "vocab_size": 67},  # of which no number of ranks has equal shares
    "qwen3": {"num_key_value_heads": 4},
    "mixtral": {"num_key_value_heads": 4},
}
PROMPTS = [np.random.default_rng(length).integers(0, 61, length).tolist() for length in (1, 18, 7)]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses(GPUS - 1, take_emulation)
    yield made
    made.close()


@pytest.fixture
def gpus(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setattr(exchanges, "MANY", MANY)
    gpu.emulated_set_devices(GPUS)
    return gpu


def bits(runner: ModelRunner, prompts: Sequence[list[int]] = PROMPTS) -> list[bytes]:
    """Tokens, logits and log probabilities of the prompts, together."""
    out = runner.generate(
        list(prompts), max_new_tokens=6, end_id=-1, return_dict=True, output_log_probs=True, output_context_logits=True
    )
    arrays = [out["output_ids"], *out["context_logits"], np.asarray(out["log_probs"])]
    return [np.ascontiguousarray(each).tobytes() for each in arrays]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("llama", "f32"), ("qwen3", "bf16"), ("mixtral", "w4g32")])
def test_any_number_of_ranks_gives_the_same_bits(
    gpus: ctypes.CDLL, processes: RankProcesses, name: str, precision: str, tmp_path: Path
) -> None:
    checkpoint = random_checkpoint(tmp_path, {**find_family(name).tiny, **SHAPE, **MODELS[name]})
    config = BuildConfig(
        target="cuda/sm90", precision=precision, sum_parts=4, tokens_per_block=16, max_batch_size=4, max_num_tokens=24
    )
    found = []
    for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)) if name == "llama" else ((1, 1), (4, 1), (2, 2)):
        engine = tmp_path / f"e{tp}{pp}"
        build(dataclasses.replace(config, tp_size=tp, pp_size=pp), checkpoint, engine)
        if tp * pp == 1:
            with ModelRunner.from_dir(engine) as runner:
                found.append(bits(runner))
            continue
        with processes.runner(engine, tp * pp) as runner:
            found.append(bits(runner))
        assert processes.said == [None] * (tp * pp - 1)
        assert found[-1] == found[0], (tp, pp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gemma3n_text", {"num_key_value_heads": 4}),  # keys of an earlier layer, a gate that needs all columns
        ("afmoe", {"num_key_value_heads": 4, "num_hidden_layers": 3}),  # gates of heads
        ("smollm3", {"num_attention_heads": 6, "num_key_value_heads": 3}),  # ranks have two key heads, and one
        ("olmo2", {"num_key_value_heads": 4}),  # attention, latents and states that every rank has
        ("qwen3_5_text", {"num_key_value_heads": 4}),
        ("deepseek_v3", {}),
    ],
)
def test_layers_of_other_models(
    gpus: ctypes.CDLL, processes: RankProcesses, name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    tiny = find_family(name).tiny
    shape = {**tiny, **(SHAPE if more else {}), "num_hidden_layers": tiny["num_hidden_layers"], **more}
    checkpoint = random_checkpoint(tmp_path, shape)
    config = BuildConfig(
        target="cuda/sm90", precision="bf16", sum_parts=2, tokens_per_block=16, max_batch_size=4, max_num_tokens=24
    )
    build(config, checkpoint, tmp_path / "whole")
    build(dataclasses.replace(config, tp_size=2), checkpoint, tmp_path / "e")
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected = bits(runner)
    with processes.runner(tmp_path / "e", 2) as runner:
        assert bits(runner) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "more"),
    [
        (8, 2, {}),  # of a KV head, a rank has half of the query heads
        (8, 1, {}),
        (9, 3, {}),  # 2, 1, 3, 3 of them
        (24, 1, {"max_num_tokens": 40}),  # too many for the kernels of decode, which a rank would have few enough for
    ],
)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("f32", marks=pytest.mark.long)])
def test_ranks_that_share_a_key_head(
    gpus: ctypes.CDLL,
    processes: RankProcesses,
    heads: int,
    kv_heads: int,
    more: dict[str, Any],
    precision: str,
    tmp_path: Path,
) -> None:
    """Prompts of as many tokens as kernels for decode take with the heads of the model, one more, and as many as with
    those of a rank; contexts that are cut; chunks of prompts."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 512}
    checkpoint = random_checkpoint(tmp_path, {**find_family("llama").tiny, **SHAPE, **MODELS["llama"], **shape})
    config = BuildConfig(
        target="cuda/sm90",
        precision=precision,
        sum_parts=4,
        tokens_per_block=16,
        max_batch_size=4,
        max_seq_len=320,
        **{"max_num_tokens": 64, **more},
    )
    rng, most = np.random.default_rng(heads), 16 * kv_heads // heads
    prompts = [rng.integers(0, 61, length).tolist() for length in (max(1, most), most + 1, 4 * most + 1, 290)]
    build(config, checkpoint, tmp_path / "whole")
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected = bits(runner, prompts)
    for tp, pp in ((4, 1), (2, 1)) if kv_heads == 1 else ((4, 1),):
        build(dataclasses.replace(config, tp_size=tp, pp_size=pp), checkpoint, tmp_path / f"e{tp}{pp}")
        with processes.runner(tmp_path / f"e{tp}{pp}", tp * pp) as runner:
            assert bits(runner, prompts) == expected
        assert processes.said == [None] * (tp * pp - 1)
    whole, own = read_plan(tmp_path / "whole"), [read_plan(tmp_path / "e41", rank) for rank in range(4)]
    assert {each.decode_tokens for each in (whole, *own)} == {most}


@pytest.mark.slow
def test_contexts_that_are_cut(gpus: ctypes.CDLL, processes: RankProcesses, tmp_path: Path) -> None:
    """Attention of a long context works in as many parts as with one rank."""
    checkpoint = random_checkpoint(
        tmp_path, {**find_family("qwen3").tiny, **SHAPE, **MODELS["qwen3"], "max_position_embeddings": 512}
    )
    config = BuildConfig(
        target="cuda/sm90",
        precision="bf16",
        sum_parts=2,
        tokens_per_block=16,
        max_batch_size=2,
        max_seq_len=320,
        max_num_tokens=96,
    )
    prompt = np.random.default_rng(3).integers(0, 61, 270).tolist()
    build(config, checkpoint, tmp_path / "whole")
    build(dataclasses.replace(config, tp_size=2), checkpoint, tmp_path / "e")
    splits = read_plan(tmp_path / "whole").splits
    assert splits[0].parts > 1
    assert read_plan(tmp_path / "e").splits == splits
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected = bits(runner, [prompt])
    with processes.runner(tmp_path / "e", 2) as runner:
        assert bits(runner, [prompt]) == expected


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, emulation: Emulation) -> Path:
    """Of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = random_checkpoint(folder, {**find_family("llama").tiny, **SHAPE, **MODELS["llama"]})
    config = BuildConfig(
        target="cuda/sm90", precision="f32", tp_size=2, tokens_per_block=16, max_batch_size=4, max_num_tokens=24
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(emulation.programs) + os.pathsep + os.environ["PATH"])
        build(config, checkpoint, folder / "e")
        build(dataclasses.replace(config, max_batch_size=2), checkpoint, folder / "other")
    return folder / "e"


def _interfere(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], None]) -> None:
    """Before the first rank enqueues its part of a step that all ranks have begun: the others wait for it in the first
    exchange, and cannot be done."""
    steps, launch = [0], CudaRankSession._launch

    def launched(session: CudaRankSession, batch: StepBatch) -> None:
        steps[0] += 1
        if steps[0] == step:
            do()
        launch(session, batch)

    monkeypatch.setattr(CudaRankSession, "_launch", launched)


def _fails(processes: RankProcesses, engine: Path, timeout: float = 20) -> str:
    """What a run says that ends because of a rank."""
    with processes.runner(engine, 2, RuntimeConfig(rank_timeout=timeout)) as runner:
        begin = time.monotonic()
        with pytest.raises(RankError) as lost:
            runner.generate(PROMPTS, max_new_tokens=20, end_id=-1)
        assert time.monotonic() - begin < timeout + 5
        with pytest.raises(RankError):
            processes.session.require_ranks()
    return str(lost.value)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others(
    gpus: ctypes.CDLL, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = RankProcesses(1, take_emulation)
    pid = processes.processes[0].pid
    assert pid is not None
    _interfere(monkeypatch, 4, lambda: os.kill(pid, signal.SIGKILL))
    said = _fails(processes, engine)
    assert re.search(r"rank 1 has ended; rank 0 waited for it on its GPU at step \d+", said), said
    assert processes.said == ["it has ended"]
    assert require_nccl().library.emulated_nccl_held() == gpus.emulated_held() == 0
    processes.close()


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(gpus: ctypes.CDLL, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = RankProcesses(1, take_emulation)
    pid = processes.processes[0].pid
    assert pid is not None
    _interfere(monkeypatch, 4, lambda: os.kill(pid, signal.SIGSTOP))
    monkeypatch.setattr(RankProcesses, "resume", lambda self: os.kill(pid, signal.SIGCONT))
    said = _fails(processes, engine, timeout=3)
    assert re.search(r"rank 1 did not come to step \d+: rank 0 waited 3 s on its GPU", said), said
    assert processes.said[0] is not None
    assert "rank 1 did not come to step" in processes.said[0]
    processes.close()


@pytest.mark.slow
def test_a_fault_of_one_gpu_ends_all_ranks(
    gpus: ctypes.CDLL, processes: RankProcesses, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault() -> None:
        raise TargetError("the CUDA driver reports an error", got="CUDA_ERROR_ECC_UNCORRECTABLE")

    _interfere(monkeypatch, 3, fault)
    said = _fails(processes, engine)
    assert "rank 0: the CUDA driver reports an error" in said
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in said
    assert processes.said[0] is not None
    assert "rank 0: the CUDA driver reports an error" in processes.said[0]


@pytest.mark.slow
def test_ranks_of_different_engines(gpus: ctypes.CDLL, processes: RankProcesses, engine: Path) -> None:
    with (
        pytest.raises(RankError, match="the ranks have different engines"),
        processes.runner(engine, 2, others=engine.parent / "other"),
    ):
        pass
    assert processes.said[0] is not None
    assert "the ranks have different engines" in processes.said[0]


@pytest.mark.slow
def test_ranks_need_a_gpu_each(gpus: ctypes.CDLL, processes: RankProcesses, engine: Path) -> None:
    gpus.emulated_set_devices(1)
    gpus.emulated_set_first_device(1)  # which is the one that rank 1 takes
    with pytest.raises(TargetError, match="ranks 0 and 1 have the same GPU"), processes.runner(engine, 2):
        pass
    gpus.emulated_set_first_device(0)
    assert processes.said[0] is not None
    assert "ranks 0 and 1 have the same GPU" in processes.said[0]
    gpus.emulated_set_devices(2)
    target = find_target("cuda/sm90")
    assert isinstance(target, CudaTarget)
    with pytest.raises(TargetError, match=r"fewer GPUs than ranks(.|\n)*4 GPUs that run cuda/sm90(.|\n)*got: 2"):
        target.rank_memory(read_plan(engine, 0), (0, 4))


@pytest.mark.slow
def test_a_rank_that_cannot_load_its_part_says_so_to_all(
    gpus: ctypes.CDLL, processes: RankProcesses, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise CapacityError("the GPU has not enough free memory")

    monkeypatch.setattr(CudaRankSession, "_load", full)
    with pytest.raises(CapacityError), processes.runner(engine, 2):
        pass
    assert processes.said[0] is not None
    assert "rank 0 cannot load its part of the engine" in processes.said[0]
    assert gpus.emulated_held() == 0


@pytest.mark.slow
def test_what_a_machine_lacks(gpu: ctypes.CDLL, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, plan = find_target("cuda/sm90"), read_plan(engine, 0)
    part = EnginePart(plan=lambda: plan)
    assert target.run_blocker(part=part) is None
    with pytest.raises(EngineError, match="one of several ranks"):
        target.open_session(plan, np.zeros(0, np.uint8), SessionOptions(num_blocks=(1,)))
    monkeypatch.setattr(nccl, "_NAMES", ("libnothing.so.2",))
    monkeypatch.setattr(nccl, "in_wheels", lambda names, parts: [])
    blocker = str(target.run_blocker(part=part))
    assert blocker.startswith("cuda/sm90 exchanges data between the ranks of this engine with NCCL: NCCL is not here; ")


def test_what_builds_refuse(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path, {**find_family("llama").tiny, **SHAPE, **MODELS["llama"]})
    for target in ("tensorrt-rtx/sm89", "tensorrt/sm90"):
        with pytest.raises(BuildError, match=rf"--tp_size 2 is not supported on {target}"):
            build(BuildConfig(target=target, tp_size=2, dry_run=True), checkpoint, tmp_path / "e")


@pytest.mark.slow
def test_all_ranks_cut_contexts_alike(engine: Path) -> None:
    """The bits of attention depend on it."""
    plans = [read_plan(engine, rank) for rank in range(2)]
    assert [plan.caches[0].kv_heads for plan in plans] == [2, 2]
    rules = split_rules(132)
    whole = dataclasses.replace(plans[0].caches[0], kv_heads=4, heads_before=0, heads_behind=0, dtype=DType.BF16)
    limits = dataclasses.replace(plans[0].limits, max_seq_len=4096)
    cut = []
    for caches in ((whole,), *((dataclasses.replace(each.caches[0], dtype=DType.BF16),) for each in plans)):
        made, _ = split_contexts(dataclasses.replace(plans[0], caches=caches, limits=limits), rules)
        cut.append(made.splits)
    assert cut[0]
    assert cut[1] == cut[2] == cut[0]
