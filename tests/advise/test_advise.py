"""A small model: every loss is that of the recipe's engine; a second run measures nothing."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ingot.advise import advise as advising
from ingot.advise import measure, points
from ingot.advise.front import AdviseOptions
from ingot.builder.build import build
from ingot.builder.calibrated.text import windows_of
from ingot.checkpoint import Checkpoint
from ingot.cli import app
from ingot.configs.build import BuildConfig
from ingot.configs.recipe import Recipe
from ingot.errors import CheckpointError
from ingot.runtime import ModelRunner
from tests.builder.calibrated.test_quantize import TEXT, checkpoint_of, quantised
from tests.graph_logits import logits_of_graph


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def logits_of_engine(engine: Path, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.floating]:
    with ModelRunner.from_dir(engine) as runner:
        out = runner.generate(ids, max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    return np.stack(out["context_logits"])


@pytest.mark.slow
def test_points_are_measured_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, recipe = checkpoint_of(tmp_path), tmp_path / "recipe.toml"
    (tmp_path / "text").write_text(TEXT[0])
    command = ["advise", "--model_dir", str(checkpoint), "--calibration", str(tmp_path / "text"), "--mixtures", "0"]
    command += ["--calibration_tokens", "60", "--measured", str(tmp_path / "m.json"), "--work_dir", str(tmp_path)]
    for module in (points, advising):
        monkeypatch.setattr(module, "LADDER", ("w4g128", "w8", "bf16"))
    monkeypatch.setattr(advising, "CHECKED", ("w4g128",))
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    monkeypatch.setattr(measure, "_ROWS", 20)  # of 61: one is left
    assert app.run([*command, "--batch", "2", "--pick", "1", "--output_recipe", str(recipe), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    picked = found["points"][found["picked"]]
    assert picked["front"]
    assert recipe.read_text() == picked["recipe"]
    assert set(picked["decode"]) == {"1", "2", "32"}
    assert {each["weights"] for each in found["points"]} >= {"w4g128", "bf16"}
    assert {each["activations"] for each in found["points"]} == {"bf16", "int8"}

    read = Recipe.load(recipe)
    config = BuildConfig(
        precision=read.precision or "",
        lm_head_precision=read.lm_head_precision,
        activations=read.activations or "bf16",
        layers=read.layers,
        autotune=False,
    )
    build(config, checkpoint, tmp_path / "engine")
    (window,) = windows_of(Checkpoint.open(checkpoint), TEXT, 99, 10_000, 60)
    ids = np.array([window])
    exact, own = log_softmax(logits_of_graph(checkpoint, ids)), log_softmax(logits_of_engine(tmp_path / "engine", ids))
    assert picked["kl"] == pytest.approx(float((np.exp(exact) * (exact - own)).sum(axis=-1).mean()), rel=0.01)
    following = np.take_along_axis(own[:, :-1], ids[:, 1:, None], axis=-1)
    assert picked["perplexity"] == pytest.approx(float(np.exp(-following.mean())), rel=1e-6)

    monkeypatch.setattr(advising, "build", None)
    assert app.run([*command, "--batch", "2", "--pick", "1"]) == 0
    table = capsys.readouterr().out
    assert "1 *" in table
    assert "perplexity of the exact model" in table
    assert not [path.name for path in tmp_path.iterdir() if "advise" in path.name]


@pytest.mark.slow
def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    quantised(tmp_path, checkpoint_of(tmp_path), "w8")
    with pytest.raises(CheckpointError, match="quantised already"):
        advising.advise(AdviseOptions(), tmp_path / "q", TEXT)


def test_a_recipe_needs_a_pick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["advise", "--model_dir", str(tmp_path), "--output_recipe", str(tmp_path / "r")]) != 0
    assert "none is picked" in capsys.readouterr().err
