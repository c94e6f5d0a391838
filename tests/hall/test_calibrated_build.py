"""One call makes what `quantize` and then `build` make, and leaves nothing beside it."""

from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.builder.calibrated.quantize import quantize
from ingot.builder.calibrated.text import text_hash
from ingot.calibrated_build import calibrated_build
from ingot.cli import app
from ingot.configs.build import BuildConfig
from ingot.configs.quantize import QuantizeOptions
from ingot.engine import read_manifest
from ingot.errors import UsageError
from tests.builder.calibrated.test_quantize import TEXT, checkpoint_of


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "activations"), [("w4g32", "f32"), ("w8a8", "auto")])
def test_it_has_the_bytes_of_two_commands(tmp_path: Path, recipe: str, activations: str) -> None:
    checkpoint = checkpoint_of(tmp_path)
    (tmp_path / "text").write_text(TEXT[0])
    config = BuildConfig(target="ref", activations=activations)
    calibrated_build(config, checkpoint, tmp_path / "one", recipe, str(tmp_path / "text"))
    quantize(QuantizeOptions(output_dir=tmp_path / "q", precision=recipe), checkpoint, TEXT)
    other = BuildConfig(target="ref", activations="int8" if recipe == "w8a8" else activations)
    build(other, tmp_path / "q", tmp_path / "two")
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    assert read_manifest(tmp_path / "one").weight_sources
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_stored_results_say_what_the_weights_were_made_of(tmp_path: Path) -> None:
    quantize(QuantizeOptions(output_dir=tmp_path / "q", precision="w8"), checkpoint_of(tmp_path), TEXT)
    build(BuildConfig(target="ref", activations="f32"), tmp_path / "q", tmp_path / "e")
    command = ["verify", str(tmp_path / "e"), "--against", str(tmp_path / "q"), "--tokens", "20", "--store_results"]
    assert app.run(command) == 0
    verification = read_manifest(tmp_path / "e").verification
    assert verification["calibration_text"] == text_hash(TEXT)
    assert "ingot i8" in str(verification["quantised_source"])


def test_other_precisions_beside_a_recipe_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_of(tmp_path)
    with pytest.raises(UsageError, match="recipe cannot be combined with --precision"):
        calibrated_build(BuildConfig(precision="w8"), checkpoint, tmp_path / "e", "w4g32")
    with pytest.raises(UsageError, match="dry_run"):
        calibrated_build(BuildConfig(dry_run=True), checkpoint, tmp_path / "e", "w4g32")
    command = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    assert app.run([*command, "--calibration", str(tmp_path / "none")]) == 2
    assert "needs --recipe" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


@pytest.mark.slow
def test_an_interrupted_call_goes_on(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    (tmp_path / "text").write_text(TEXT[0])
    config = BuildConfig(target="ref", activations="f32")

    def stop(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        calibrated_build(config, checkpoint, tmp_path / "e", "w4g32", str(tmp_path / "text"), stop)
    assert not (tmp_path / "e").exists()
    calibrated_build(config, checkpoint, tmp_path / "e", "w4g32", str(tmp_path / "text"), say=said.append)
    assert [line for line in said if line.startswith("continuing after 3")]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
