"""Engines whose sums are made in parts: near the source, the same bits in every company; what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.engine import open_engine, read_manifest
from ingot.errors import UsageError
from ingot.plugins.quantised import round_to_int8
from ingot.runtime import ModelRunner
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.convert.quantised.test_formats import CASES
from tests.e2e.command import ingot
from tests.e2e.same_bits import random_checkpoint
from tests.e2e.test_quantised import bits
from tests.tiny import tiny_model

SHAPE = {"num_attention_heads": 4, "hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1},
    "gemma3_text": {"num_key_value_heads": 4},
    "mixtral": {"num_key_value_heads": 2},
    "gpt_oss": {"num_key_value_heads": 2},  # experts with biases
}


def made(folder: Path, name: str) -> Path:
    return random_checkpoint(folder, {**find_family(name).tiny, **SHAPE, **MODELS[name]})


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", {**find_family(name).tiny, **SHAPE, **MODELS[name]})
    convert(ConvertOptions(model_dir=model.folder, output_dir=tmp_path / "c"))
    ids = np.random.default_rng(3).integers(0, 61, (1, 40))
    expected = model.logits(ids)[0]
    for target in ("cpu", "ref"):
        config = BuildConfig(target=target, precision="f32", sum_parts=4, autotune=False)
        build(config, tmp_path / "c", tmp_path / target)
    with ModelRunner.from_dir(tmp_path / "cpu") as runner:
        out = runner.generate(ids.tolist(), max_new_tokens=1, return_dict=True, output_context_logits=True, end_id=-1)
    for found in (out["context_logits"][0], engine_logits(tmp_path / "ref", ids)[0]):
        assert np.abs(found - expected).max() < 1e-4 * np.ptp(expected)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("name", "precision", "activations"),
    [
        ("llama", "bf16", "auto"),
        ("qwen3", "w8", "int8"),
        ("gemma3_text", "w4g32", "int8"),
        ("mixtral", "w4g32", "bf16"),
        ("mixtral", "w8", "int8"),
    ],
)
def test_no_bit_depends_on_company_or_threads(name: str, precision: str, activations: str, tmp_path: Path) -> None:
    config = BuildConfig(precision=precision, activations=activations, sum_parts=4, tokens_per_block=16)
    build(config, made(tmp_path, name), tmp_path / "e")
    random = np.random.default_rng(4)
    prompts = [random.integers(0, 61, length).tolist() for length in (1, 30, 17, 5)]
    with ModelRunner.from_dir(tmp_path / "e") as runner:
        alone = [bits(runner, [prompt])[0] for prompt in prompts]
        assert bits(runner, prompts) == alone
    with ModelRunner.from_dir(tmp_path / "e", max_num_tokens=7, threads=3) as runner:
        assert bits(runner, prompts) == alone


def test_each_part_rounds_its_own_inputs(tmp_path: Path) -> None:
    """A part's scale is that of its columns alone: so a rank needs nothing of the others before it multiplies."""
    config = BuildConfig(target="ref", precision="w8", activations="int8", sum_parts=2, autotune=False)
    build(config, made(tmp_path, "llama"), tmp_path / "e")
    with open_engine(tmp_path / "e") as engine:
        parts = [step for step in engine.plan.steps if step.name.startswith("layers.0/down.part")]
        cols = {buffer.name: buffer.cols for buffer in engine.plan.buffers}
        shapes = {weight.name: weight.shape for weight in engine.plan.weights}
    assert [cols[step.inputs[0]] for step in parts] == [64, 64]
    assert [shapes[step.inputs[1]] for step in parts] == [(64, 64)] * 2
    x = np.concatenate([np.full((1, 64), 0.01), np.full((1, 64), 100)], axis=1).astype(np.float32)
    codes, _ = round_to_int8(x)
    assert not codes[:, :64].any(), "one scale for the row loses the first part; a scale of its own does not"
    assert round_to_int8(x[:, :64])[0].all()


@pytest.mark.slow
def test_verify_and_inspect_know_the_parts(tmp_path: Path) -> None:
    """`verify` holds every part and every sum against its reference, and each weight against the source."""
    checkpoint = made(tmp_path, "mixtral")
    args = ("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", "--precision", "w4g32", "--sum_parts", 2)
    ingot("build", *args, "--no_autotune").succeeds()
    done = ingot("verify", tmp_path / "e", "--against", checkpoint, "--tokens", 24).succeeds()
    assert "verify: OK" in done.out
    shown = ingot("inspect", tmp_path / "e").succeeds().out
    assert "attention_out.part1" in shown
    assert "sums        in 2 parts" in shown


def test_codes_of_a_checkpoint_are_kept_part_by_part(tmp_path: Path) -> None:
    for name, precision in (("awq g32", "w4tsg32"), ("bnb int8", "w8")):
        folder = tmp_path / name.replace(" ", "-")
        settings, packer, _ = CASES[name]
        write.write_model(folder / "m", settings, packer)
        convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c"))
        build(BuildConfig(target="ref", activations="bf16", sum_parts=2, autotune=False), folder / "c", folder / "e")
        manifest = read_manifest(folder / "e")
        assert manifest.precision == precision
        found = {weight: error for weight, error in manifest.weight_errors.items() if ".part" in weight}
        assert found
        assert max(found.values()) == 0


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"power of two(.|\n)*1, 2, 4(.|\n)*3"):
        BuildConfig(sum_parts=3)
    checkpoint = random_checkpoint(tmp_path, find_family("llama").tiny)
    with pytest.raises(UsageError, match=r"--sum_parts 64 is too large"):
        build(BuildConfig(target="ref", sum_parts=64), checkpoint, tmp_path / "e")
    ingot("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", "--sum_parts", 3).fails(
        "power of two", code=2
    )
