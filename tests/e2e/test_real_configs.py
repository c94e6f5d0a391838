"""Configurations of real models, shrunk in size alone: logits and tokens are those of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.read import Section
from ingot.convert.convert import convert
from ingot.convert.family import read_model
from tests.builder.engines import engine_logits
from tests.programs import model_shapes, real_configs
from tests.real_models import REAL_MODELS
from tests.tiny import tiny_model

TOLERANCE = 1e-5  # of the range of the logits
TOLERANCE_OF_FEW = 3e-5  # the delta rule and several streams amplify what float32 rounds


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", REAL_MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", REAL_MODELS[name].shrunk())
    report = convert(ConvertOptions(model_dir=model.folder, output_dir=tmp_path / "c"))
    build(BuildConfig(target="cpu", precision="f32", tokens_per_block=16), tmp_path / "c", tmp_path / "e")
    ids = np.random.default_rng(3).integers(0, 61, (1, 40))
    expected = model.exact_logits(ids)
    sensitive = report.model.mixer is not None or report.model.streams is not None
    tolerance = TOLERANCE_OF_FEW if sensitive else TOLERANCE
    assert np.abs(engine_logits(tmp_path / "e", ids) - expected).max() < tolerance * np.ptp(expected)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_whole_and_cut_models_are_read(name: str) -> None:
    model = REAL_MODELS[name]
    whole = read_model(Section(dict(model.config), "config.json"), None)[1]
    small = read_model(Section(model.shrunk(), "config.json"), None)[1]
    assert whole.num_layers == model.config["num_hidden_layers"]
    assert (whole.moe is None, type(whole.mixer)) == (small.moe is None, type(small.mixer))
    if not whole.sharing_layers:
        assert read_model(Section(model.cut(8), "config.json"), None)[1].num_layers == 8


def test_the_program_writes_few_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["model_shapes", "nemotron-3-nano", "--layers=7", f"--output={tmp_path / 'c.json'}"]
    )
    model_shapes.main()
    made = json.loads((tmp_path / "c.json").read_text())
    assert (made["num_hidden_layers"], made["hidden_size"], len(made["layers_block_type"])) == (7, 2688, 7)


def test_the_program_writes_layers_of_chosen_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, shape = ["linear_attention", "full_attention"], ["model_shapes", "qwen3.5-35b-a3b", "--layers=2"]
    monkeypatch.setattr("sys.argv", [*shape, f"--output={tmp_path / 'c.json'}", "--layer_types", *kinds])
    model_shapes.main()
    made = json.loads((tmp_path / "c.json").read_text())
    assert (made["layer_types"], made["num_experts"]) == (kinds, 256)
    monkeypatch.setattr("sys.argv", [*shape, f"--output={tmp_path / 'd.json'}", "--layer_types", "conv", "conv"])
    with pytest.raises(SystemExit):
        model_shapes.main()


FEW = ("openai--gpt-oss-20b", "Qwen--Qwen3.5-27B", "mlc--llama3_2_1b", "google--gemma-4-26B-A4B", "mlc--phi-2")


@pytest.mark.shared
@pytest.mark.parametrize("name", [*FEW, pytest.param("", marks=(pytest.mark.slow, pytest.mark.long))])
def test_files_as_their_makers_wrote_them(
    shared: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The long test takes all files. Each has the logits of transformers, or is refused with a reason."""
    files = sorted((shared / "data" / "model_configs").glob(f"{name}*.json"))
    assert files
    monkeypatch.setattr("sys.argv", ["real_configs", *map(str, files)])
    assert real_configs.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(files)
    refused = [line for line in lines if ": refused: " in line]
    assert len(refused) == (len(files) if name == "mlc--phi-2" else 0) or not name
    assert name or len(lines) - len(refused) >= 100


def test_what_is_small_has_every_option() -> None:
    config = {**REAL_MODELS["deepseek-v3"].config, "quantization_config": {}}
    small = real_configs.shrunk(config)
    assert set(config) - set(small) == {"quantization_config"}
    assert (small["n_group"], small["n_routed_experts"], small["num_hidden_layers"]) == (8, 16, 4)
