"""Runs an engine, or a plan and its weights, in numpy: the session of `ref` over one batch of equally long prompts."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.engine import open_engine
from ingot.plan import Plan
from ingot.plugins.ref.session import RefSession
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch

Float32 = npt.NDArray[np.float32]


def plan_logits(plan: Plan, weights: npt.NDArray[np.uint8], ids: npt.NDArray[np.int64]) -> Float32:
    """ids [batch, sequence] → logits [batch, sequence, vocab], one sequence per step, blocks in reverse order."""
    blocks = -(-ids.shape[1] // plan.tokens_per_block)
    session = RefSession(plan, weights, SessionOptions(num_blocks=plan.in_each(blocks + 1)))
    rows = []
    for sequence in ids.astype(np.int32):
        batch = StepBatch(
            ids=sequence,
            query_starts=np.array([0, len(sequence)], np.int32),
            past_lengths=np.zeros(1, np.int32),
            block_tables=np.tile(np.arange(blocks, 0, -1, dtype=np.int32), (len(plan.caches), 1, 1)),
            slots=np.full(1, -1, np.int32),
            draws=np.empty(0, np.int32),
            want_logits=True,
            logit_rows=np.arange(len(sequence), dtype=np.int32),
        )
        logits = session.run(batch).logits
        assert logits is not None, "they were wanted"
        rows.append(logits)
    return np.stack(rows)


def engine_logits(directory: Path, ids: npt.NDArray[np.int64]) -> Float32:
    """As `plan_logits`, from an engine directory."""
    with open_engine(directory) as engine:
        return plan_logits(engine.plan, engine.weights, ids)
