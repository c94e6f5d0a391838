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
from ingot.configs.speculation import Speculation
from ingot.convert.convert import convert
from ingot.engine import open_engine
from ingot.plugins.registry import targets
from ingot.plugins.target import Target
from ingot.runtime.drafts.row_times import RowTimes
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import Request
from ingot.step_io import Int32
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


class Scripted:
    """A drafter that knows the texts to come, and is wrong now and then. See Drafter."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts, self._rng = texts, np.random.default_rng(0)

    def match(self, request: Request, most: int) -> tuple[int, int]:
        return int(self._rng.integers(1, most + 1)), 1

    def seconds(self, requests: int, depth: int) -> float:
        return 0.0

    def make(self, counts: Mapping[Request, int]) -> Mapping[Request, Int32]:
        return {request: self._drafts(request, count) for request, count in counts.items()}

    def _drafts(self, request: Request, count: int) -> Int32:
        known = request.tokens[: request.num_tokens].tolist()
        text = next(text for text in self._texts if text[: len(known)] == known)
        drafts = np.array(text[len(known) : len(known) + count], np.int32)
        if self._rng.random() < 0.3:
            drafts[self._rng.integers(len(drafts))] = self._rng.integers(VOCAB)
        return drafts

    def forget(self, request: Request) -> None: ...

    def close(self) -> None: ...


def check_drafts(model: TinyModel, target: Target, pools: int | tuple[int, ...]) -> None:
    """Drafts change no bit: right ones, wrong ones, alone and in company."""

    def said(runner: ModelRunner, given: list[list[int]]) -> list[tuple[list[int], bytes, bytes]]:
        out = runner.generate(
            given,
            max_new_tokens=24,
            temperature=0.9,
            random_seed=3,
            num_return_sequences=2,
            end_id=-1,
            return_dict=True,
            output_log_probs=True,
            output_generation_logits=True,
        )
        rows = zip(out["output_ids"], out["sequence_lengths"], out["log_probs"], out["generation_logits"], strict=True)
        return [
            (ids[:length].tolist(), log_probs.tobytes(), logits.tobytes())
            for row in rows
            for ids, length, log_probs, logits in zip(*row, strict=True)
        ]

    prompts, alone = prompts_of(1, 50, 33, 5), list[tuple[list[int], bytes, bytes]]()
    for prompt in prompts:
        with poisoned_runner(model, target, pools, config=COLD) as runner:
            alone += said(runner, [prompt])
    config = RuntimeConfig(speculation=Speculation(num_speculative_tokens=9))
    with poisoned_runner(model, target, pools, config=config, seed=1) as runner:
        drafting = runner.executor._loop._drafting
        assert drafting is not None
        drafting._drafter = Scripted([text for text, _, _ in alone])
        drafting._times = AsFast()
        assert said(runner, prompts) == alone, "together"
        for place, prompt in enumerate(prompts):
            assert said(runner, [prompt]) == alone[2 * place : 2 * place + 2], "one after the other"
        work = runner.executor.work()
    assert work.drafted > work.right_drafts > 50


class AsFast(RowTimes):
    """Steps take as long, whatever their rows: then all drafts pay."""

    def predict(self, rows: int) -> float:
        return 1.0
