"""`ingot quantize` as users call it: what it prints for people and for programs."""

import json
from pathlib import Path

import pytest

from tests.builder.calibrated.test_quantize import LLAMA, TEXT, write_tokenizer
from tests.e2e.command import ingot
from tests.handmade import write_model


@pytest.mark.slow
def test_json_says_what_was_made_of_each_matmul(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", LLAMA)
    write_tokenizer(model)
    (tmp_path / "text").write_text(TEXT[0])
    args = ("--model_dir", model, "--output_dir", tmp_path / "q", "--recipe", "w4g32", "--codes", "symmetric")
    done = ingot("quantize", *args, "--calibration", tmp_path / "text", "--json").succeeds()
    found = json.loads(done.out)
    assert (found["version"], found["output_dir"], found["resumed"], found["left"]) == (1, str(tmp_path / "q"), 0, [])
    assert {each["name"] for each in found["products"]} >= {"layers.0/qkv", "layers.1/down"}
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert {each["format"] for each in found["products"]} == set(config["quantised"].values())
    assert all(0 < each["loss"] <= each["plain"] for each in found["products"])
    assert f"{len(found['products'])} matmuls quantised on {found['tokens']} tokens" in done.err
    assert ingot("quantize", *args, "--calibration", tmp_path / "text").succeeds().out == ""
