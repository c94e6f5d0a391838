"""Stacks of MXFP4 experts, as gpt-oss stores them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.read import Section
from ingot.convert.convert import convert
from ingot.convert.quantised.combine import combined
from ingot.convert.quantised.form import Quantised
from ingot.convert.quantised.read import read_quantised
from ingot.convert.weights import Filling, Row, Take, Unpair, filled
from ingot.dtypes import DType
from ingot.engine import read_manifest
from ingot.errors import CheckpointError
from ingot.plugins.registry import find_op
from ingot.tensor_file import read_header
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.graph_logits import logits_of_graph

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS, INNER = 3, 64


def stack(rng: np.random.Generator, rows: int, columns: int) -> tuple[write.Tensors, np.ndarray]:
    """(blocks and scales, the values [E, rows, columns])"""
    codes = rng.integers(0, 16, (EXPERTS, rows, columns // 32, 32))
    scales = rng.integers(120, 124, codes.shape[:3]).astype(np.uint8)
    values = write.E2M1[codes] * np.ldexp(1.0, scales.astype(int) - 127)[..., None]
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    tensors: write.Tensors = {"blocks": (DType.U8, blocks), "scales": (DType.U8, scales)}
    return tensors, values.reshape(EXPERTS, rows, columns).astype(np.float32)


def values_of(weight: Quantised) -> np.ndarray:
    """[rows, columns] as float32."""
    codes, scale = (
        np.concatenate([block.reshape(-1) for block in weight.pieces[name].read()]) for name in ("codes", "scale")
    )
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(weight.rows, -1)
    exponents = (scale.astype(np.uint32) << 16).view(np.float32).reshape(weight.rows, -1)
    values: np.ndarray = np.asarray(weight.table, np.float32)[codes] * np.repeat(exponents, weight.group, axis=1)
    return values


@pytest.mark.shared
def test_a_checkpoint_that_another_program_wrote(shared: Path) -> None:
    """The rows of gate_up alternate; a family's row puts them behind one another."""
    folder = shared / "models" / "quantised" / "gpt-oss-mxfp4-experts"
    expected = load_file(folder / "reference.safetensors")
    config = Section.from_file(folder / "config.json")
    found = read_quantised(config, folder, read_header(folder / "model.safetensors"))
    assert len(found.quantised) == 2
    for name, weight in found.quantised.items():
        wanted = expected[name].transpose(0, 2, 1)
        assert weight.shape == wanted.shape
        np.testing.assert_array_equal(values_of(weight).reshape(weight.shape), wanted)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    row = Row("gate_up", filled(Unpair(Take(name), heads=0), Filling(heads=8, experts=4, names=())))
    unpaired = combined(row.name, row.expr, {**found.tensors, **found.quantised})
    wanted = expected[name].transpose(0, 2, 1)
    wanted = np.concatenate([wanted[:, 0::2], wanted[:, 1::2]], axis=1)
    np.testing.assert_array_equal(values_of(unpaired).reshape(wanted.shape), wanted)


def write_model(folder: Path, drop: str = "") -> None:
    """folder / "stacks" with MXFP4 experts, folder / "float" with their values."""
    rng = np.random.default_rng(0)
    base = "model.layers.0.mlp.experts"
    named: write.Tensors = {
        name: (DType.F32, (rng.standard_normal(shape) / 8).astype(np.float32))
        for name, shape in {
            **{f"model.layers.0.{name}.weight": s for name, s in write.PRODUCTS.items() if "self_attn" in name},
            "model.layers.0.mlp.gate.weight": (EXPERTS, write.HIDDEN),
            "model.embed_tokens.weight": (write.VOCAB, write.HIDDEN),
            "lm_head.weight": (write.VOCAB, write.HIDDEN),
        }.items()
    }
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        named[f"{name}.weight"] = (DType.F32, np.ones(write.HIDDEN, np.float32))
    plain, stacks = dict(named), dict(named)
    for name, rows, columns in (("gate_up_proj", 2 * INNER, write.HIDDEN), ("down_proj", write.HIDDEN, INNER)):
        tensors, values = stack(rng, rows, columns)
        plain[f"{base}.{name}"] = (DType.F32, values)
        stacks |= {f"{base}.{name}_{part}": each for part, each in tensors.items()}
    stacks.pop(f"{base}.{drop}", None)
    config = {
        **write.CONFIG,
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "intermediate_size": INNER,
        "attention_bias": False,
        "sliding_window": None,
    }
    write.save(folder / "float", config, plain)
    write.save(folder / "stacks", {**config, "quantization_config": SETTINGS}, stacks)


def test_a_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    for name in ("float", "stacks"):
        convert(ConvertOptions(model_dir=tmp_path / name, output_dir=tmp_path / f"{name}.checkpoint"))
    ids = np.random.default_rng(3).integers(0, write.VOCAB, (1, 9))
    expected = logits_of_graph(tmp_path / "float.checkpoint", ids)
    bound = 1e-5 * np.ptp(expected)
    np.testing.assert_allclose(logits_of_graph(tmp_path / "stacks.checkpoint", ids), expected, rtol=0, atol=bound)
    build(BuildConfig(target="ref", precision="f32"), tmp_path / "stacks.checkpoint", tmp_path / "engine")
    np.testing.assert_allclose(engine_logits(tmp_path / "engine", ids), expected, rtol=0, atol=bound)
    kinds = json.loads((tmp_path / "stacks.checkpoint" / "config.json").read_text())["quantised"]
    assert set(kinds.values()) == {"mxfp4 u4g32"}
    config = BuildConfig(target="ref", activations="f32", kv_cache_dtype="f32")
    plan = build(config, tmp_path / "stacks.checkpoint", tmp_path / "auto").plan
    kept = {step.kernel for step in plan.steps if step.op.startswith("moe_") and "group" in step.attrs}
    assert kept == {"moe_gate_up.w4t.ref", "moe_down.w4t.ref"}
    errors = read_manifest(tmp_path / "auto").weight_errors
    experts = {
        step.inputs[find_op(step.op).packed or 0] for step in plan.steps if step.op in ("moe_gate_up", "moe_down")
    }
    assert [errors[name] for name in experts] == [0, 0]


@pytest.mark.parametrize(
    ("drop", "words"),
    [("down_proj_scales", "lacks its scales"), ("gate_up_proj_blocks", "lacks its (blocks|scales)|unclaimed")],
)
def test_what_is_missing(tmp_path: Path, drop: str, words: str) -> None:
    write_model(tmp_path, drop)
    with pytest.raises(CheckpointError, match=words):
        convert(ConvertOptions(model_dir=tmp_path / "stacks", output_dir=tmp_path / "checkpoint"))
