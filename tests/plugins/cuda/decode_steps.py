"""Decode steps of changing numbers of sequences, in a session and in `ref` on the same plan: the logits must agree."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.engine import Engine
from ingot.plugins.ref.session import RefSession
from ingot.plugins.target import SessionOptions
from ingot.step_io import Session, StepBatch
from tests.handmade import write_model
from tests.plugins.cpu.one_step import batch_of

SEQUENCES = 8
BLOCKS = 2 * SEQUENCES


def wide_group(folder: Path, group: int = 32) -> Path:
    """A checkpoint of a llama with so many query heads, of 16 dims each, and one KV head."""
    config = {**find_family("llama").tiny, "num_attention_heads": group, "num_key_value_heads": 1, "head_dim": 16}
    write_model(folder / "m", config)
    convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c"))
    return folder / "c"


def compare_decode(session: Session, engine: Engine, sizes: Sequence[int], tolerance: float) -> None:
    """Prompts of all sequences, then a step for each of `sizes`, of the first so many sequences."""
    ref = RefSession(engine.plan, engine.weights, SessionOptions(num_blocks=engine.plan.in_each(BLOCKS)))
    lengths = [2 + index for index in range(SEQUENCES)]
    tables = [[BLOCKS - 1 - index, index] for index in range(SEQUENCES)]
    ids = (np.arange(sum(lengths)) * 5 % engine.plan.vocab_size).astype(np.int32)
    prompts = batch_of([(0, length) for length in lengths], tables, [0], ids=ids, want_logits=True)
    _compare(session, ref, prompts, tolerance)
    for number, size in enumerate(sizes):
        parts = [(length, 1) for length in lengths[:size]]
        ids = ((np.arange(size) * 3 + number) % engine.plan.vocab_size).astype(np.int32)
        step = batch_of(parts, tables[:size], range(size), ids=ids, want_logits=True)
        _compare(session, ref, step, tolerance)
        lengths[:size] = [length + 1 for length in lengths[:size]]


def _compare(session: Session, ref: Session, batch: StepBatch, tolerance: float) -> None:
    found, expected = session.run(batch).logits, ref.run(batch).logits
    assert found is not None
    assert expected is not None
    assert np.abs(found - expected).max() < tolerance * np.ptp(expected), f"{len(batch.past_lengths)} sequences"
