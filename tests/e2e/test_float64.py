"""Logits of packed engines equal float64 with the same quantised weights and the same rounding of activations."""

from pathlib import Path

import numpy as np
import pytest

from ingot.engine import open_engine
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model
from tests.oracle.plan_float64 import ATTENDED, compare_with_float64

POSITIONS = 64
KINDS = [
    ("f32", "auto", "auto"),
    ("bf16", "auto", "auto"),
    ("w8", "int8", "int8"),
    ("w8", "bf16", "auto"),
    ("w4g128", "int8", "bf16"),
    ("w4g64", "bf16", "int8"),
    ("w4g32", "int8", "f32"),
]
ERROR = 1e-6  # of the largest logit
DOUBT = 2e-6  # of the largest value of a row

# K = 40, 172 and 48, N = 61: nothing is a multiple of a panel, a tile or a group
ODD = {**TINY_LLAMA, "model_type": "qwen3", "hidden_size": 40, "intermediate_size": 172, "max_position_embeddings": 80}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    ingot("convert", "--model_dir", write_model(folder / "m", ODD), "--output_dir", folder / "c").succeeds()
    return folder / "c"


@pytest.mark.daily(5)
@pytest.mark.parametrize(("precision", "activations", "kv"), KINDS)
def test_64_positions(precision: str, activations: str, kv: str, checkpoint: Path, tmp_path: Path) -> None:
    options = ("--precision", precision, "--activations", activations, "--kv_cache_dtype", kv, "--no_autotune")
    ingot("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", *options).succeeds()
    ids = np.random.default_rng(3).integers(0, 61, POSITIONS).astype(np.int32)
    with open_engine(tmp_path / "e") as engine:
        figures = compare_with_float64(engine, ids)
    print(figures)
    assert figures.error < ERROR
    assert figures.doubt < DOUBT
    assert figures.attended < ATTENDED
