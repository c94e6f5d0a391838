"""Every kernel and product of a decode step alone, by the GPU's own clock, beside what it moves and computes."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ingot.engine import open_engine
from ingot.fixed_tables import blocks_needed, fixed_tables
from ingot.plan import Plan
from ingot.plugins.cuda.session import CudaSession
from ingot.plugins.plan_work import PlanWork
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch
from ingot.step_work import Load
from tests.gpu_proof.result import Result

REPETITIONS = 30


def step_times(name: str, engine_dir: Path, target: str, batch: int, context: int) -> Iterator[Result]:
    """A result per kind of step: seconds of its launches, bytes and operations, and the rates that they make."""
    opened = open_engine(engine_dir)
    with contextlib.closing(opened):
        plan = opened.plan
        blocks = blocks_needed(plan, sequences=batch, length=context + 1)
        session = find_target(target).open_session(plan, opened.weights, SessionOptions(num_blocks=blocks))
        assert isinstance(session, CudaSession), "part d is for cuda targets"
        with contextlib.closing(session):
            timed = session.time_work(decode_batch(plan, batch, context), REPETITIONS)
    work, load = PlanWork(plan), Load(sequences=[(context, 1)] * batch, logit_rows=batch)
    steps = {step.name: step for step in plan.steps}
    kinds: dict[tuple[str, str], list[tuple[str, Mapping[str, float]]]] = {}
    for step, parts in timed.items():
        of_layer = step.split("/")[-1] if step.startswith("layers.") else step
        kinds.setdefault((of_layer, steps[step].kernel), []).append((step, parts))
    for (kind, kernel), members in kinds.items():
        moved = [work.of(steps[step], load) for step, _ in members]
        seconds = sum(sum(parts.values()) for _, parts in members)
        nbytes, operations = sum(each.nbytes for each in moved), sum(each.operations for each in moved)
        launches = {part: sum(parts[part] for _, parts in members) / len(members) for part in members[0][1]}
        yield Result(
            name=f"{name}: kernels of {batch}: {kind}",
            command=f"python -m tests.gpu_proof --parts d, {engine_dir.name}",
            figures={
                "kernel": kernel,
                "calls": len(members),
                "seconds": seconds,
                "gbs": nbytes / seconds / 1e9 if seconds else None,
                "tflops": operations / seconds / 1e12 if seconds else None,
                "nbytes": nbytes,
                "operations": operations,
                "seconds_each": launches,
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
