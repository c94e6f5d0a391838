"""CPU engines whose ranks are processes: the bits of one rank, and what happens when one of them is lost."""

import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.convert import convert
from ingot.engine import read_manifest
from ingot.errors import RankError, RequestError, UsageError
from ingot.runtime import ModelRunner
from ingot.timed_run import TimedRun
from tests import quantised as write
from tests.convert.quantised.test_formats import CASES as FORMATS
from tests.e2e.test_quantised import bits
from tests.e2e.test_tensor_parallel import PROMPTS, made
from tests.runtime.rank_processes import RankProcesses

CASES = [
    ("llama", "f32", "auto", "cpu", 4),
    ("llama", "bf16", "auto", "cpu", 2),
    ("qwen3", "w8", "int8", "cpu/avx2", 2),
    ("gemma3_text", "w4g32", "int8", "cpu", 4),
    ("mixtral", "w4g32", "bf16", "cpu", 2),
    ("gpt_oss", "f32", "auto", "cpu/avx2", 2),
    ("gpt2", "w8", "int8", "cpu", 4),
    ("smollm3", "bf16", "auto", "cpu", 4),
    ("smollm3", "w4g32", "int8", "cpu/avx2", 2),
    ("bloom", "bf16", "auto", "cpu", 2),
    ("afmoe", "f32", "auto", "cpu", 4),
    ("gemma3n_text", "w8", "int8", "cpu", 4),
    ("gemma4_text", "bf16", "auto", "cpu", 4),
    ("olmo2", "bf16", "auto", "cpu", 4),
    ("qwen3_5_text", "w8", "int8", "cpu", 2),
    ("lfm2", "f32", "auto", "cpu/avx2", 4),
    ("deepseek_v3", "bf16", "auto", "cpu", 2),
    ("cohere", "bf16", "auto", "cpu", 4),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    build(BuildConfig(target="cpu", precision="f32", tp_size=2, autotune=False), made(folder, "llama"), folder / "e")
    return folder / "e"


@pytest.mark.daily(1)
@pytest.mark.parametrize(("name", "precision", "activations", "target", "ranks"), CASES)
def test_the_bits_of_one_rank(
    name: str, precision: str, activations: str, target: str, ranks: int, tmp_path: Path, processes: RankProcesses
) -> None:
    checkpoint = made(tmp_path, name)
    config = BuildConfig(
        target=target, precision=precision, activations=activations, sum_parts=4, tokens_per_block=16, autotune=False
    )
    build(config, checkpoint, tmp_path / "whole")
    build(dataclasses.replace(config, tp_size=ranks), checkpoint, tmp_path / "e")
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected = bits(runner, PROMPTS)
    with processes.runner(tmp_path / "e", ranks) as runner:
        assert bits(runner, PROMPTS) == expected
        assert bits(runner, PROMPTS[1:]) != expected
    assert processes.said == [None] * (ranks - 1)
    small = RuntimeConfig(max_num_tokens=7, threads=2)
    with processes.runner(tmp_path / "e", ranks, small) as runner:
        assert bits(runner, PROMPTS) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("target", "activations"), [("cpu", "int8"), ("cpu/avx2", "bf16")])
def test_the_bits_of_one_rank_with_columns_in_another_order(
    target: str, activations: str, tmp_path: Path, processes: RankProcesses
) -> None:
    settings, packer, _ = FORMATS["gptq v1 asymmetric, desc_act"]
    write.write_model(tmp_path / "m", settings, packer)
    convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "c"))
    config = BuildConfig(target=target, activations=activations, sum_parts=2, tokens_per_block=16, autotune=False)
    build(config, tmp_path / "c", tmp_path / "whole")
    build(dataclasses.replace(config, tp_size=2), tmp_path / "c", tmp_path / "e")
    assert read_manifest(tmp_path / "e").lost_codes == {}
    prompts = [[token % write.VOCAB for token in prompt] for prompt in PROMPTS]
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected = bits(runner, prompts)
    with processes.runner(tmp_path / "e", 2) as runner:
        assert bits(runner, prompts) == expected


def test_steps_with_their_times(engine: Path, processes: RankProcesses) -> None:
    """What `bench kernels` measures, of the first rank: every sequence has keys of its own on every rank."""
    with processes.runner(engine, 2) as runner:
        (expected,) = runner.generate(PROMPTS[1:], max_new_tokens=3, end_id=-1)[:, 0, len(PROMPTS[1]) :].tolist()
    with processes.runner(engine, 2) as runner:
        plan = runner.engine.plan
        run = TimedRun(processes.session, plan, sequences=2, length=30)
        chunks = [run.prefill(np.array(PROMPTS[1], np.int32), sequence)[-1] for sequence in (0, 1)]
        found = [np.concatenate([chunk.ids for chunk in chunks])]
        for past in (len(PROMPTS[1]), len(PROMPTS[1]) + 1):
            step = run.decode(found[-1], past)
            found.append(step.ids)
        assert [ids.tolist() for ids in found] == [[token] * 2 for token in expected]
        assert all(
            part > 0 for part, each in zip(step.times.parts, plan.steps, strict=False) if each.op == "all_reduce"
        )


def refused(processes: RankProcesses, engine: Path, others: Path) -> str:
    with pytest.raises(RankError) as error, processes.runner(engine, 2, others=others):
        pass
    return str(error.value)


@pytest.fixture
def pair() -> Iterator[RankProcesses]:
    made = RankProcesses(1)
    yield made
    made.close()


@pytest.mark.slow
def test_a_rank_that_is_stopped(engine: Path, pair: RankProcesses) -> None:
    pid = pair.processes[0].pid
    assert pid is not None
    with pair.runner(engine, 2, RuntimeConfig(rank_timeout=1)) as runner:
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 1 did not come to the beginning of step 1: rank 0 waited 1 s"):
            runner.generate(PROMPTS, max_new_tokens=4)
        assert time.monotonic() - began < 10
        os.kill(pid, signal.SIGCONT)
    assert "rank 1 did not come" in str(pair.said[0])


def test_a_rank_that_is_killed(engine: Path, pair: RankProcesses) -> None:
    pid = pair.processes[0].pid
    assert pid is not None
    with pair.runner(engine, 2) as runner:
        expected = runner.generate(PROMPTS, max_new_tokens=2)
        pair.session.native.set_step_delay(0.002)
        stream = runner.generate(PROMPTS, max_new_tokens=20, end_id=-1, streaming=True)
        assert (next(stream)[:, 0, 0] == expected[:, 0, 0]).all()
        assert runner.executor.failure is None
        os.kill(pid, signal.SIGKILL)
        pair.processes[0].join()
        with pytest.raises(RankError, match="rank 1 has ended"):
            list(stream)
        assert "rank 1 has ended" in str(runner.executor.failure)
        with pytest.raises(RequestError, match=r"closed(.|\n)*rank 1 has ended"):
            runner.generate(PROMPTS, max_new_tokens=2)
    assert pair.said == ["it has ended"]


@pytest.mark.slow
def test_ranks_that_cannot_open(engine: Path, tmp_path: Path, processes: RankProcesses) -> None:
    shutil.copytree(engine, tmp_path / "missing")
    (tmp_path / "missing" / "rank1.engine").unlink()
    assert "rank1.engine" in refused(processes, engine, tmp_path / "missing")
    assert "rank1.engine" in str(processes.said[0])
    config = BuildConfig(target="cpu", precision="w8", tp_size=2, autotune=False)
    build(config, engine.parent / "c", tmp_path / "w8")
    assert "different engines" in refused(processes, engine, tmp_path / "w8")
    assert "different engines" in str(processes.said[0])


@pytest.mark.slow
def test_one_process_alone(engine: Path) -> None:
    with pytest.raises(UsageError, match=r"2 ranks(.|\n)*mpirun -n 2"):
        ModelRunner.from_dir(engine)
    with pytest.raises(UsageError, match=r"MPI says which"):
        ModelRunner.from_dir(engine, rank=1)
