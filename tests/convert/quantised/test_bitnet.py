"""Packed BitNet models as transformers computes them: with weights of three values, and with inputs of int8 too."""

import copy
import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from tests.builder.engines import Float32, engine_logits
from tests.tiny import TinyModel, random_model

KINDS = ("bitlinear", "autobitlinear")
CONFIG = {**find_family("bitnet").tiny, "hidden_size": 128, "intermediate_size": 320}
IDS = np.random.default_rng(1).integers(0, 61, (2, 40))
TOLERANCE = 1e-4  # of the range of the logits


def packed(folder: Path, kind: str) -> TinyModel:
    """A model directory of packed weights, and the model with the weights that are meant.

    The token table has values that w8 holds, so that an engine changes no weight.
    """
    model = random_model(CONFIG, dtype=torch.bfloat16)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        codes = torch.randint(-127, 128, table.shape, generator=torch.Generator().manual_seed(5))
        codes[:, 0] = 127
        table.copy_(codes / 128)
    tensors = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    for name, linear in products(model):
        size = linear.weight.data.abs().mean()
        values = (linear.weight.data / size).round().clamp(-1, 1)
        scale = (1 / size if kind == "bitlinear" else size).to(torch.bfloat16).reshape(1)
        linear.weight.data = values / scale.float() if kind == "bitlinear" else values * scale.float()
        quarters = (values + 1).to(torch.uint8).chunk(4)
        tensors[f"{name}.weight"] = sum(
            (each << 2 * i for i, each in enumerate(quarters)), torch.zeros_like(quarters[0])
        )
        tensors[f"{name}.weight_scale"] = scale
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    settings = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    return TinyModel(folder=folder, model=model)


def products(model: Any) -> list[tuple[str, torch.nn.Linear]]:
    """Those that transformers replaces by layers of its own."""
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    return [(name, each) for name, each in found if name != "lm_head"]


def with_rounding_layers(model: TinyModel, kind: str) -> TinyModel:
    """The same weights in the layers of transformers, which round their inputs to int8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what torch imports to compile
        layers = importlib.import_module("transformers.integrations.bitnet")
    made = copy.deepcopy(model.model)
    for name, linear in products(made):
        size = linear.weight.data.abs().max()
        values = (linear.weight.data / size).round()
        shape = (linear.in_features, linear.out_features, False)
        if kind == "bitlinear":
            layer = layers.BitLinear(*shape, dtype=torch.float32)
            layer.weight.copy_(layers.pack_weights(values))
            layer.weight_scale.copy_(1 / size)
        else:
            layer = layers.AutoBitLinear(*shape, dtype=torch.float32)
            layer.weight.data = values
            layer.weight_scale.copy_(size)
        made.set_submodule(name, layer)
    return TinyModel(folder=model.folder, model=made)


def engine(folder: Path, precision: str, activations: str) -> tuple[Float32, set[str]]:
    """Logits, and the weights and inputs of its matmuls."""
    config = BuildConfig(
        target="ref",
        precision=precision,
        activations=activations,
        kv_cache_dtype="f32",
        lm_head_precision="f32" if precision == "f32" else "bf16",
    )
    report = build(config, folder / "c", folder / f"{precision}-{activations}")
    kernels = {step.kernel.split(".")[1] for step in report.plan.steps if step.op == "matmul"}
    return engine_logits(report.output_dir, IDS), kernels


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model(kind: str, tmp_path: Path) -> None:
    """An engine of floats, and one that keeps the codes."""
    model = packed(tmp_path / "m", kind)
    convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "c"))
    expected = model.logits(IDS)
    for precision, wanted in (("f32", {"f32"}), ("auto", {"w2t", "bf16"})):
        found, kernels = engine(tmp_path, precision, "f32")
        assert kernels == wanted
        assert np.abs(found - expected).max() < TOLERANCE * np.ptp(expected)


@pytest.mark.slow  # what transformers imports for its layers takes seconds
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_rounded_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """Inputs in the middle of two steps may go either way, which moves few of them."""
    model = packed(tmp_path / "m", kind)
    convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "c"))
    found, kernels = engine(tmp_path, "auto", "int8")
    assert kernels == {"w2ta8", "bf16"}
    rounding = with_rounding_layers(model, kind)
    with torch.compiler.set_stance("force_eager"):
        expected = rounding.logits(IDS)
    assert _distance(found, expected) < 0.3 * _distance(model.logits(IDS), expected)


def _distance(a: Float32, b: Float32) -> float:
    return float(np.sqrt(np.square(a - b).mean()))
