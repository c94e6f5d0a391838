"""Chunks of one prompt that pipeline stages compute at once: the bits of one rank, whatever leaves or is preempted."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.runtime import RuntimeConfig
from ingot.configs.sampling import SamplingParams
from ingot.convert.family import find_family
from ingot.engine import read_plan
from ingot.runtime import ModelRunner
from tests.e2e.same_bits import random_checkpoint
from tests.e2e.test_pipeline_parallel import MODELS
from tests.runtime.rank_processes import RankProcesses

RANDOM = np.random.default_rng(7)
HEAD = RANDOM.integers(0, 61, 64).tolist()
PROMPTS = [
    RANDOM.integers(0, 61, 150).tolist(),
    [*HEAD, *RANDOM.integers(0, 61, 50).tolist()],
    [*HEAD, *RANDOM.integers(0, 61, 77).tolist()],
    RANDOM.integers(0, 61, 3).tolist(),
    RANDOM.integers(0, 61, 70).tolist(),
    RANDOM.integers(0, 61, 69).tolist(),
]
PARAMS = SamplingParams(max_tokens=40, temperature=0.9, seed=5, logprobs=1, prompt_logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses(3)
    yield made
    made.close()


def made(folder: Path, name: str) -> Path:
    """A model for long prompts."""
    return random_checkpoint(folder, {**find_family(name).tiny, **MODELS[name], "max_position_embeddings": 2048})


def results(runner: ModelRunner, prompts: list[list[int]]) -> list[tuple[bytes, bytes, Any, Any]]:
    """All logits and probabilities of each prompt."""
    out = runner.generate(
        prompts, sampling_config=PARAMS, return_dict=True, output_context_logits=True, output_generation_logits=True
    )
    names = ("context_logits", "generation_logits")
    logits = [[out[name][place].tobytes() for name in names] for place in range(len(prompts))]
    return [
        (context, generated, out["prompt_logprobs"][place], out["logprobs"][place])
        for place, (context, generated) in enumerate(logits)
    ]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [("gemma3_text", 1, 2), ("llama", 1, 4), ("llama", 2, 2), ("qwen3_5_text", 1, 2), ("falcon_h1", 1, 2)],
)
def test_chunks_under_way_give_the_same_bits(
    name: str, tp: int, pp: int, tmp_path: Path, processes: RankProcesses
) -> None:
    """With windows, with states, in four stages, in small steps, after prefix hits, with little memory."""
    checkpoint = made(tmp_path, name)
    config = BuildConfig(
        target="cpu", precision="f32", sum_parts=tp, tokens_per_block=16, max_seq_len=240, autotune=False
    )
    build(config, checkpoint, tmp_path / "whole")
    build(dataclasses.replace(config, tp_size=tp, pp_size=pp), checkpoint, tmp_path / "e")
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected = results(runner, PROMPTS)
    plans = [read_plan(tmp_path / "e", rank) for rank in range(tp * pp)]
    tight = len(plans) * max(
        sum((6 if cache.state else 18) * cache.block_bytes for cache in plan.caches) for plan in plans
    )
    for tokens, memory in ((16, None), (40, tight), (7, None)):
        options = RuntimeConfig(max_num_tokens=tokens, kv_cache_memory=memory, rank_timeout=20, threads=1)
        with processes.runner(tmp_path / "e", tp * pp, options) as runner:
            assert results(runner, PROMPTS[:1]) == expected[:1]
            work = runner.executor.work()
            assert work.overlapped >= 150 // tokens - 1, "chunks follow each other"
            assert results(runner, PROMPTS) == expected
            stream = runner.generate(PROMPTS[2:4], max_new_tokens=30, end_id=-1, streaming=True)
            next(stream)
            unread = runner.generate(PROMPTS[1:], max_new_tokens=3, streaming=True)
            next(stream)
            unread.close()
            stream.close()
            assert results(runner, PROMPTS[::-1]) == expected[::-1]
            if memory is not None:
                assert results(runner, PROMPTS[3:]) == expected[3:]
                assert runner.stats()["preemptions"] > 0
        assert processes.said == [None] * (tp * pp - 1)


def test_a_long_prompt_alone_fills_both_stages(tmp_path: Path, processes: RankProcesses) -> None:
    config = BuildConfig(target="cpu", tokens_per_block=16, max_input_len=1200, pp_size=2, autotune=False)
    build(config, made(tmp_path, "llama"), tmp_path / "e")
    with processes.runner(tmp_path / "e", 2) as runner:
        runner.generate([np.random.default_rng(1).integers(0, 61, 1100).tolist()], max_new_tokens=1, end_id=-1)
        assert runner.step_log() == [[256, 0]] * 4 + [[76, 0]], "though a step may have 2,048 tokens"
        assert runner.executor.work().idle_stages == 1
