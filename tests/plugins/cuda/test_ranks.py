"""Engines of several ranks on emulated GPUs, in a process each: the bits of one rank, and what a lost rank does."""

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.convert.family import find_family
from ingot.runtime import ModelRunner
from tests.e2e.same_bits import random_checkpoint
from tests.plugins.cuda.gpu_ranks import GPUS, take_emulation
from tests.runtime.rank_processes import RankProcesses

# Heads of 16 dims: each size is compiled.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 16, "num_hidden_layers": 2}
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
def gpus(gpu: ctypes.CDLL) -> ctypes.CDLL:
    gpu.emulated_set_devices(GPUS)
    return gpu


def bits(runner: ModelRunner) -> list[bytes]:
    """Tokens, logits and log probabilities of the prompts, together."""
    out = runner.generate(
        PROMPTS, max_new_tokens=6, end_id=-1, return_dict=True, output_log_probs=True, output_context_logits=True
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
    for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
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
