"""What is said of weights whose codes an engine does not keep."""

from pathlib import Path
from typing import Any

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_manifest
from ingot.inspect import inspect
from ingot.lost_codes import lost_lines
from tests import quantised as write
from tests.convert.quantised.test_formats import CASES

ORDERED = "the checkpoint orders its columns in its own way (desc_act, actorder), "
INNER = {"layers.0/attention_out", "layers.0/down"}


def checkpoint_of(folder: Path, name: str, packer: write.Packer | None = None) -> Path:
    settings, own, _ = CASES[name]
    write.write_model(folder / "model", settings, packer or own)
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))
    return folder / "checkpoint"


@pytest.mark.parametrize(
    ("options", "weights", "reason"),
    [
        ({"sum_parts": 2}, set(), ""),
        ({"tp_size": 2}, set(), ""),
        (
            {"refit": True},
            {*INNER, "layers.0/qkv", "layers.0/gate_up"},
            f"{ORDERED}and with --refit new weights may come in another order",
        ),
        ({}, set(), ""),
        ({"precision": "w8"}, set(), ""),
    ],
    ids=["sum_parts", "tp_size", "refit", "nothing", "another precision"],
)
def test_options_that_keep_no_order_of_columns(
    tmp_path: Path, options: dict[str, Any], weights: set[str], reason: str
) -> None:
    packer = write.gptq(4, 32, shuffled=True, same_order=True)
    checkpoint = checkpoint_of(tmp_path, "gptq v1 asymmetric, desc_act", packer)
    config = BuildConfig(target="ref", activations="bf16", **options)
    report = build(config, checkpoint, tmp_path / "engine")
    lost = read_manifest(tmp_path / "engine").lost_codes
    assert lost == dict.fromkeys(sorted(weights), f"stored as w8, because {reason}")
    said = [note for note in report.notes if note.startswith("codes of ")]
    assert said == [f"codes of {line}" for line in lost_lines(lost)]
    found = inspect(tmp_path / "engine")
    assert found.document["lost_codes"] == lost
    assert all(f"not kept    {each}" in text for each in said for text in (found.text, found.summary))
    assert ("not kept" in found.text) == bool(weights)


@pytest.mark.parametrize("option", ["sum_parts", "tp_size"])
def test_shares_of_an_order_that_are_not_equal(tmp_path: Path, option: str) -> None:
    """Six heads in four parts: the columns of down are divided evenly, and keep their order."""
    settings, _, _ = CASES["gptq v1 asymmetric, desc_act"]
    heads = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    products = {**write.PRODUCTS, **dict.fromkeys(heads, (96, 64)), "self_attn.o_proj": (64, 96)}
    config = {"num_attention_heads": 6, "num_key_value_heads": 6}
    packer = write.gptq(4, 32, shuffled=True, same_order=True)
    write.write_model(tmp_path / "model", settings, packer, config=config, products=products)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    built = BuildConfig(target="ref", activations="bf16", **{option: 4})  # type: ignore[arg-type]
    build(built, tmp_path / "checkpoint", tmp_path / "engine")
    reason = f"stored as w8, because {ORDERED}and --{option} 4 cannot divide them into equal parts of whole heads"
    assert read_manifest(tmp_path / "engine").lost_codes == {"layers.0/attention_out": reason}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ct 4 bits, ragged groups", "16 does not divide its groups of 40 columns"),
        ("modelopt int4", "its scales do not belong to groups of a row's columns"),
    ],
)
def test_codes_that_no_format_holds(tmp_path: Path, name: str, words: str) -> None:
    report = build(BuildConfig(target="ref"), checkpoint_of(tmp_path, name), tmp_path / "engine")
    (note,) = [each for each in report.notes if each.startswith("codes of ")]
    assert note.endswith(words)


def test_layers_share_a_line() -> None:
    lost = {f"layers.{number}/down": "why" for number in (0, 1, 2, 5)}
    assert lost_lines({**lost, "lm_head": "why", "layers.1/qkv": "other"}) == [
        "layers.0-2,5/down, lm_head: why",
        "layers.1/qkv: other",
    ]
