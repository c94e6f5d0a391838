"""The plan of a built engine, run by the numpy references, gives the logits of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from tests.builder.engines import engine_logits
from tests.tiny import LLAMA3, TinyModel, load_model, tiny_gpt2, tiny_llama

TOLERANCE = {"f32": 1e-4, "bf16": 3e-2}  # of the range of the logits

LLAMAS: dict[str, dict[str, Any]] = {
    "head_dim 8, mqa": {"head_dim": 8, "heads": 8, "kv_heads": 1, "vocab": 67},
    "head_dim 12, mha, tied, inter 172": {"head_dim": 12, "heads": 3, "kv_heads": 3, "tied": True, "inter": 172},
    "head_dim 80, biases": {"head_dim": 80, "heads": 2, "kv_heads": 1, "biases": True, "layers": 1},
    "llama3 scaling, inter 7": {"rope": LLAMA3, "inter": 7},
    "f16, gelu": {"dtype": torch.float16, "hidden_act": "gelu"},
}
GPT2S: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, head_dim 12": {"tied": False, "head_dim": 12, "heads": 5, "vocab": 67},
    "inter 20, erf": {"inter": 20, "activation_function": "gelu"},
    "relu, by layer": {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
}


def off_by(model: TinyModel, folder: Path, vocab: int, precision: str, length: int = 37) -> float:
    """Largest error of the engine's logits, relative to the range of the true ones."""
    convert(ConvertOptions(model_dir=model.folder, output_dir=folder / "c"))
    build(BuildConfig(target="ref", precision=precision), folder / "c", folder / "e")
    ids = np.random.default_rng(1).integers(0, vocab, (2, length))
    expected = model.logits(ids)
    return float(np.abs(engine_logits(folder / "e", ids) - expected).max() / np.ptp(expected))


@pytest.mark.parametrize("name", LLAMAS)
def test_llama(tmp_path: Path, name: str) -> None:
    model = tiny_llama(tmp_path / "m", **LLAMAS[name])
    assert off_by(model, tmp_path, LLAMAS[name].get("vocab", 61), "f32") < TOLERANCE["f32"]


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", GPT2S)
def test_gpt2(tmp_path: Path, name: str) -> None:
    model = tiny_gpt2(tmp_path / "m", **GPT2S[name])
    assert off_by(model, tmp_path, GPT2S[name].get("vocab", 61), "f32") < TOLERANCE["f32"]


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_bf16(tmp_path: Path, make: Any) -> None:
    error = off_by(make(tmp_path / "m", dtype=torch.bfloat16), tmp_path, 61, "auto")
    assert 1e-5 < error < TOLERANCE["bf16"]


@pytest.mark.daily(1)
@pytest.mark.shared
@pytest.mark.parametrize(("name", "length", "vocab"), [("stories260K", 50, 512), ("gpt-nano-sort", 11, 3)])
def test_shared_models(shared: Path, tmp_path: Path, name: str, length: int, vocab: int) -> None:
    model = load_model(shared / "models" / name)
    assert off_by(model, tmp_path, vocab, "f32", length) < TOLERANCE["f32"]
