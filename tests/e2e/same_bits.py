"""Models drawn at random on every target that runs here: what tests of same bits share."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.convert import convert
from ingot.engine import open_engine
from ingot.plugins.registry import targets
from ingot.plugins.target import Target
from tests.runtime.test_bit_identity import everything
from tests.runtime.tiny_engine import poisoned_runner
from tests.runtime.tiny_plan import TinyModel

SIZE, VOCAB = 16, 61  # tokens per block, of the vocabulary
RUNNABLE = [each.name for each in targets() if not each.on_gpu and each.run_blocker() is None]
# By the type of the weights: those whose kernels are no other target's. `avxvnni` has int8 products of its own alone,
# `avx512bf16` and `amx` have products and attention of bf16.
OWN_KERNELS = {
    "f32": [name for name in RUNNABLE if name in ("ref", "cpu/avx2", "cpu/avx512")],
    "bf16": [name for name in RUNNABLE if name in ("cpu/avx2", "cpu/avx512bf16", "cpu/amx")],
}
HEADS = (0, SIZE, 4 * SIZE)  # tokens that prompts have in common
COLD = RuntimeConfig(enable_prefix_cache=False)


def random_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """folder/c, of a config.json."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    convert(ConvertOptions(config=folder / "config.json", random_weights=3, output_dir=folder / "c"))
    return folder / "c"


def build_for_all(checkpoint: Path, out: Path, precision: str, longest: int) -> Path:
    """An engine for each of RUNNABLE; longest: tokens of a sequence."""
    names = ",".join(RUNNABLE)
    config = BuildConfig(target=names, precision=precision, tokens_per_block=SIZE, max_seq_len=longest, autotune=False)
    build(config, checkpoint, out)
    return out


def opened(engine: Path, target: Target) -> TinyModel:
    found = open_engine(engine, target=target.name)
    return TinyModel(plan=found.plan, weights=found.weights, logical={})


def prompts_of(*lengths: int, head: int = 0) -> list[list[int]]:
    """Of these lengths behind `head` tokens that all share."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, VOCAB, head).tolist()
    return [shared + rng.integers(0, VOCAB, length).tolist() for length in lengths]


def check_chunks(model: TinyModel, target: Target, pools: int | tuple[int, ...]) -> None:
    """Chunks and company change no bit."""
    prompts, alone = prompts_of(1, 70, 33, 5), list[tuple[bytes, bytes]]()
    for prompt in prompts:
        with poisoned_runner(model, target, pools, config=COLD) as runner:
            alone += everything(runner, [prompt])
    for chunk in (1, 7, 64):
        limits = dataclasses.replace(model.plan.limits, max_num_tokens=chunk)
        with poisoned_runner(model, target, pools, limits, seed=chunk) as runner:
            assert everything(runner, prompts) == alone, f"chunks of {chunk}"
