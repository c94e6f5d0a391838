"""Every kernel and product of a decode step alone, by the GPU's own clock, beside what it moves and computes."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ingot.engine import Engine, open_engine
from ingot.fixed_tables import blocks_needed, fixed_tables
from ingot.plan import Plan, Step
from ingot.plugins.cuda.session import CudaSession
from ingot.plugins.plan_work import PlanWork
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch
from ingot.step_work import Load
from tests.gpu_proof.result import Result

REPETITIONS = 10


def decode_times(name: str, engine_dir: Path, target: str, batch: int, context: int) -> Iterator[Result]:
    """One token of each of so many sequences, behind so many others."""
    what, load = f"{name}: kernels of {batch}", Load(sequences=[(context, 1)] * batch, logit_rows=batch)
    opened = open_engine(engine_dir)
    with contextlib.closing(opened):
        blocks = blocks_needed(opened.plan, sequences=batch, length=context + 1)
        yield from _times(what, opened, target, blocks, decode_batch(opened.plan, batch, context), load)


def prefill_times(name: str, engine_dir: Path, target: str, length: int) -> Iterator[Result]:
    """A prompt of so many tokens."""
    what, load = f"{name}: kernels of a prompt of {length}", Load(sequences=[(0, length)], logit_rows=1)
    opened = open_engine(engine_dir)
    with contextlib.closing(opened):
        blocks = blocks_needed(opened.plan, sequences=1, length=length)
        yield from _times(what, opened, target, blocks, prefill_batch(opened.plan, length), load)


def same_bits(engine_dir: Path, target: str, batch: int, context: int, times: int) -> int:
    """How many of so many runs of one decode step have the logits of the first, bit for bit. All sequences have the
    same prompt before it."""
    opened = open_engine(engine_dir)
    with contextlib.closing(opened):
        plan = opened.plan
        blocks = blocks_needed(plan, sequences=batch, length=context + 1)
        session = find_target(target).open_session(plan, opened.weights, SessionOptions(num_blocks=blocks))
        step = dataclasses.replace(decode_batch(plan, batch, context), want_logits=True)
        prompts = prefill_batch(plan, context)
        with contextlib.closing(session):
            for sequence in range(batch):
                session.run(dataclasses.replace(prompts, block_tables=step.block_tables[:, sequence : sequence + 1]))
            first, alike = session.run(step).logits, 0
            assert first is not None, "they were wanted"
            for _ in range(times):
                found = session.run(step).logits
                alike += int(found is not None and np.array_equal(first, found))
    return alike


def _times(
    what: str, opened: Engine, target: str, blocks: tuple[int, ...], batch: StepBatch, load: Load
) -> Iterator[Result]:
    """A result per kind of step: seconds of its launches, bytes and operations, and the rates that they make."""
    plan = opened.plan
    work, kinds = PlanWork(plan), dict[tuple[str, str], list[Step]]()
    for step in plan.steps:
        of_layer = step.name.split("/")[-1] if step.name.startswith("layers.") else step.name
        kinds.setdefault((of_layer, step.kernel), []).append(step)
    session = find_target(target).open_session(plan, opened.weights, SessionOptions(num_blocks=blocks))
    assert isinstance(session, CudaSession), "part d is for cuda targets"
    with contextlib.closing(session):
        for (kind, kernel), steps in kinds.items():
            each = session.time_work(batch, [step.name for step in steps], REPETITIONS)
            seconds, moved = sum(each.values()) * len(steps), [work.of(step, load) for step in steps]
            nbytes, operations = sum(each.nbytes for each in moved), sum(each.operations for each in moved)
            yield Result(
                name=f"{what}: {kind}",
                command=f"python -m tests.gpu_proof --parts d, {opened.directory.name}",
                figures={
                    "kernel": kernel,
                    "calls": len(steps),
                    "seconds": seconds,
                    "gbs": nbytes / seconds / 1e9 if seconds else None,
                    "tflops": operations / seconds / 1e12 if seconds else None,
                    "nbytes": nbytes,
                    "operations": operations,
                    "seconds_each": dict(each),
                },
            )


def decode_batch(plan: Plan, batch: int, context: int) -> StepBatch:
    """One token of every sequence behind `context` others, in blocks of its own. Nothing is drawn."""
    rows = np.arange(batch, dtype=np.int32)
    return StepBatch(
        ids=rows % plan.vocab_size,
        query_starts=np.arange(batch + 1, dtype=np.int32),
        past_lengths=np.full(batch, context, np.int32),
        block_tables=fixed_tables(plan, sequences=batch, length=context + 1),
        logit_rows=rows,
        slots=np.full(batch, -1, np.int32),
        draws=np.zeros(0, np.int32),
    )


def prefill_batch(plan: Plan, length: int) -> StepBatch:
    """A whole prompt, of which the last token's logits are wanted. Nothing is drawn."""
    return StepBatch(
        ids=np.arange(length, dtype=np.int32) % plan.vocab_size,
        query_starts=np.array([0, length], np.int32),
        past_lengths=np.zeros(1, np.int32),
        block_tables=fixed_tables(plan, sequences=1, length=length),
        logit_rows=np.array([length - 1], np.int32),
        slots=np.full(1, -1, np.int32),
        draws=np.zeros(0, np.int32),
    )
