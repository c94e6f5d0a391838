"""The Graph of a Checkpoint, run by onnxruntime, gives the logits of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import family_names, find_family
from ingot.dtypes import DType
from tests.graph_logits import logits_of_graph
from tests.tiny import LLAMA3, TinyModel, load_model, logits_by_token, tiny_gpt2, tiny_llama, tiny_model

TOLERANCE = 1e-5  # of the range of the logits

LLAMAS: dict[str, dict[str, Any]] = {
    "head_dim 8, mqa": {"head_dim": 8, "heads": 8, "kv_heads": 1, "vocab": 67},
    "head_dim 12, mha, tied": {"head_dim": 12, "heads": 3, "kv_heads": 3, "tied": True, "inter": 172},
    "head_dim 48, gqa 3": {"head_dim": 48, "heads": 6, "kv_heads": 2, "hidden": 54, "vocab": 33, "layers": 1},
    "head_dim 80, biases": {"head_dim": 80, "heads": 2, "kv_heads": 1, "biases": True, "layers": 1},
    "head_dim 256, inter 7": {"head_dim": 256, "heads": 2, "kv_heads": 1, "inter": 7, "layers": 1},
    "llama3 scaling": {"rope": LLAMA3},
    "linear scaling": {"rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn scaling": {
        "rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    },
    "bf16, tied": {"dtype": torch.bfloat16, "tied": True},
    "f16": {"dtype": torch.float16, "biases": True},
    "gelu": {"hidden_act": "gelu", "rms_norm_eps": 1e-2},
}
GPT2S: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, head_dim 12": {"tied": False, "head_dim": 12, "heads": 5, "vocab": 67},
    "inter 20, erf": {"inter": 20, "activation_function": "gelu"},
    "relu, bf16": {"activation_function": "relu", "dtype": torch.bfloat16},
    "unscaled, by layer": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "head_dim": 4},
    "upcast": {"reorder_and_upcast_attn": True, "layer_norm_epsilon": 1e-2},
}


def assert_golden(model: TinyModel, checkpoint: Path, vocab: int) -> None:
    report = convert(ConvertOptions(model_dir=model.folder, output_dir=checkpoint))
    onnx.checker.check_model(str(checkpoint / "model.onnx"), full_check=True)
    ids = np.random.default_rng(1).integers(0, vocab, (3, 57))
    expected = model.logits(ids) if report.model.mixer is None else logits_by_token(model.model, ids)
    error = np.abs(logits_of_graph(checkpoint, ids) - expected).max() / np.ptp(expected)
    assert error < TOLERANCE, f"off by {error:.1e} of the range"


@pytest.mark.parametrize("name", LLAMAS)
def test_llama(tmp_path: Path, name: str) -> None:
    model = tiny_llama(tmp_path / "model", **LLAMAS[name])
    assert_golden(model, tmp_path / "checkpoint", LLAMAS[name].get("vocab", 61))


@pytest.mark.parametrize("name", GPT2S)
def test_gpt2(tmp_path: Path, name: str) -> None:
    model = tiny_gpt2(tmp_path / "model", **GPT2S[name])
    assert_golden(model, tmp_path / "checkpoint", GPT2S[name].get("vocab", 61))


@pytest.mark.daily(9)
@pytest.mark.parametrize("name", family_names())
def test_every_family(tmp_path: Path, name: str) -> None:
    config = dict(find_family(name).tiny)
    assert_golden(tiny_model(tmp_path / "model", config), tmp_path / "checkpoint", 61)


def test_long_factors_are_those_of_long_texts(tmp_path: Path) -> None:
    """transformers takes them for texts of more than the 128 original positions."""
    model = tiny_model(tmp_path / "model", dict(find_family("phi3").tiny))
    convert(ConvertOptions(model_dir=model.folder, output_dir=tmp_path / "checkpoint", rope_factors="long"))
    ids = np.random.default_rng(1).integers(0, 61, (1, 150))
    expected = model.logits(ids)
    error = np.abs(logits_of_graph(tmp_path / "checkpoint", ids) - expected).max() / np.ptp(expected)
    assert error < TOLERANCE


@pytest.mark.shared
@pytest.mark.parametrize(("name", "ids"), [("stories260K", (2, 100, 512)), ("gpt-nano-sort", (8, 11, 3))])
def test_shared_models(shared: Path, tmp_path: Path, name: str, ids: tuple[int, int, int]) -> None:
    batch, length, vocab = ids
    model = load_model(shared / "models" / name)
    convert(ConvertOptions(model_dir=model.folder, output_dir=tmp_path / "checkpoint"))
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, length))
    expected = model.logits(tokens)
    error = np.abs(logits_of_graph(tmp_path / "checkpoint", tokens) - expected).max() / np.ptp(expected)
    assert error < TOLERANCE


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_rounded_while_streaming(tmp_path: Path, dtype: DType) -> None:
    model = tiny_llama(tmp_path / "model")
    convert(ConvertOptions(model_dir=model.folder, output_dir=tmp_path / "checkpoint", dtype=dtype))
    for parameter in model.model.parameters():
        parameter.data.copy_(parameter.data.to(torch.bfloat16 if dtype is DType.BF16 else torch.float16))
    ids = np.random.default_rng(1).integers(0, 61, (2, 9))
    expected = model.logits(ids)
    error = np.abs(logits_of_graph(tmp_path / "checkpoint", ids) - expected).max() / np.ptp(expected)
    assert error < TOLERANCE
