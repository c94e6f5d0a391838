"""Decode steps as CUDA graphs: one graph serves every number of sequences of its bucket, and nothing else does."""

import ctypes
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.engine import open_engine
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from tests.plugins.cuda.decode_steps import BLOCKS, SEQUENCES, compare_decode, wide_group

TOLERANCE = {"f32": 2e-5, "bf16": 2e-2}  # of the range of the logits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_group(tmp_path_factory.mktemp("wide"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
def test_large_groups_decode_with_any_number_of_sequences(
    gpu: ctypes.CDLL, checkpoint: Path, precision: str, tmp_path: Path, replayed: list[object]
) -> None:
    """32 query heads of a KV head take the tile of prefill, idle rows too: 5, 7 and 8 sequences share a graph."""
    config = BuildConfig(
        target="cuda/sm90", precision=precision, tokens_per_block=16, max_batch_size=SEQUENCES, max_num_tokens=48
    )
    build(config, checkpoint, tmp_path / "e")
    engine = open_engine(tmp_path / "e")
    for sizes in ((5, 5, 7), (8, 8, 5, 6, 1, 8)):
        session = find_target("cuda/sm90").open_session(
            engine.plan, engine.weights, SessionOptions(num_blocks=engine.plan.in_each(BLOCKS))
        )
        compare_decode(session, engine, sizes, TOLERANCE[precision])
        assert len(replayed) == len(sizes), "every decode step is a graph"
        replayed.clear()
        session.close()
