"""Part c: small models whose answers are known, on the GPU and on the CPU in f32."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ingot.bench.timing import random_prompts
from ingot.compare.compare import CompareOptions, compare
from ingot.configs.build import BuildConfig
from ingot.engine import read_manifest, read_plan
from ingot.quickstart import SHIPPED
from ingot.runtime import ModelRunner
from ingot.step_io import Int32
from tests.gpu_proof.result import Check, Result
from tests.gpu_proof.work import Job, checkpoint_of, engine_of

PRECISIONS = ("f32", "bf16", "f16")
PROMPTS, NEW = 48, 48
LENGTHS = (1, 7, 15, 16, 17, 31, 33, 100)  # of the prompts, in turn
LETTERS = 6


def tokens(job: Job) -> Iterator[Check]:
    """Per model: greedy tokens in f32, then every layer in each precision; then the sorts."""
    for model in (SHIPPED, *job.models):
        yield Check.of(f"tokens of {model.name}", _same_tokens_of, job, model)
        for precision in PRECISIONS:
            yield Check.of(f"layers of {model.name} in {precision}", layers, job, model, precision)
    yield Check.of("729 sorts", sorts, job)


def _same_tokens_of(job: Job, model: Path) -> Result:
    return same_tokens(job, checkpoint_of(job.work, model))


def layers(job: Job, model: Path, precision: str) -> Result:
    """Every layer against the Checkpoint."""
    checkpoint = checkpoint_of(job.work, model)
    engine, command = engine_of(checkpoint, BuildConfig(target=job.target, precision=precision))
    found = compare(engine, checkpoint, CompareOptions(target=job.target))
    return Result(
        name=f"layers of {model.name} in {precision}",
        ok=not found.findings,
        command=f"{command}; ingot verify {engine} --against {checkpoint}",
        figures={**found.results(), "findings": [f"{each.step}: {each.what}" for each in found.findings]},
    )


def same_tokens(job: Job, checkpoint: Path) -> Result:
    """Greedy, all prompts at once: prefill in chunks, decode through captured graphs."""
    engines = [engine_of(checkpoint, BuildConfig(target=target, precision="f32")) for target in (job.target, "cpu")]
    plan = read_plan(engines[0][0])
    longest = read_manifest(engines[0][0]).limits.max_seq_len
    new = min(NEW, longest // 2)
    sizes = [min(length, longest - new) for _, length in zip(range(PROMPTS), itertools.cycle(LENGTHS), strict=False)]
    prompts = [random_prompts(1, size, plan.vocab_size, number)[0] for number, size in enumerate(sizes)]
    ours, theirs = (_generate(engine, prompts, new) for engine, _ in engines)
    equal = int(sum(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True)))
    return Result(
        name=f"tokens of {checkpoint.name.removesuffix('-checkpoint')} in f32",
        ok=equal == len(prompts),
        command="; ".join(command for _, command in engines),
        figures={"prompts": len(prompts), "new": new, "equal": equal},
    )


def sorts(job: Job) -> Result:
    """Every sequence of six letters out of three; the answer follows, sorted."""
    if job.sort_model is None:
        asked = "python -m tests.gpu_proof --parts c --sort_model DIR"
        return Result(name="729 sorts", command=asked, missing="--sort_model names no model")
    engine, command = engine_of(
        checkpoint_of(job.work, job.sort_model), BuildConfig(target=job.target, precision="f32")
    )
    inputs = [list(letters) for letters in itertools.product(range(3), repeat=LETTERS)]
    out = _generate(engine, inputs, LETTERS)
    right = sum(row[LETTERS : 2 * LETTERS].tolist() == sorted(each) for row, each in zip(out, inputs, strict=True))
    return Result(
        name="729 sorts", command=command, ok=right == len(inputs), figures={"inputs": len(inputs), "right": right}
    )


def _generate(engine: Path, prompts: list[list[int]], new: int) -> Int32:
    with ModelRunner.from_dir(engine) as runner:
        return np.asarray(runner.generate(prompts, max_new_tokens=new, end_id=-1))[:, 0]
