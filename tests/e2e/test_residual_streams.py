"""Gemma 3n: token ids without embeddings in the layers are no tokens; what streams take of each other stays exact."""

from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.families.gemma3n_text import FAMILY
from ingot.engine import read_plan
from tests.builder.engines import engine_logits
from tests.tiny import tiny_model

TOKENS = 50  # of 61


@pytest.mark.slow
def test_ids_of_images_are_no_tokens(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", {**FAMILY.tiny, "vocab_size_per_layer_input": TOKENS})
    report = convert(ConvertOptions(model_dir=model.folder, output_dir=tmp_path / "c"))
    assert (report.model.vocab_size, report.model.stored_rows) == (TOKENS, 61)
    ids = np.random.default_rng(2).integers(0, TOKENS, (1, 12))
    expected = model.logits(ids)[..., :TOKENS]
    for precision, tolerance in (("f32", 1e-5), ("w8", 0.05)):
        build(BuildConfig(target="cpu", precision=precision, tokens_per_block=16), tmp_path / "c", tmp_path / precision)
        found = engine_logits(tmp_path / precision, ids)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < tolerance * np.ptp(expected)
    steps = [step.kernel for step in read_plan(tmp_path / "w8").steps if step.op == "matmul"]
    precise = sum(kernel.startswith("matmul.f32.") for kernel in steps)
    assert precise == 4 * report.model.num_layers, "two routers and two products of them in each layer"
