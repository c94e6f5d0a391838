"""The table "Exit codes of build, case by case" of docs/errors.md: each case that needs no other machine is tried."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.cli import app
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from tests.handmade import TINY_LLAMA, write_model
from tests.house.project import ROOT

TABLE = (
    (ROOT / "docs/errors.md").read_text().partition("### Exit codes of build, case by case")[2].partition("\n## ")[0]
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Checkpoint; not to be changed."""
    folder = tmp_path_factory.mktemp("exit_codes")
    convert(ConvertOptions(model_dir=write_model(folder / "m", TINY_LLAMA), output_dir=folder / "c"))
    return folder / "c"


def _flip(folder: Path) -> None:
    weights = folder / "model.safetensors"
    text = bytearray(weights.read_bytes())
    text[-1] ^= 1
    weights.write_bytes(text)


def _other_format(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "schema_version": 1}))


def _no_checkpoint(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--kv_cache_dtype", "f16"], 1, "no kernel of the target"),
        (["--max_mem", "1MiB"], 1, "more memory than `--max_mem`"),
        (["--precision", "w5"], 2, "`--precision w5`"),
        (["--target", "cpu/avx9"], 2, "`--target cpu/avx9`"),
        (["--no_such_option"], 2, "an option is unknown"),
        (["--recipe", "w4g128", "--precision", "w8"], 2, "`--recipe` and `--precision`"),
        (["--activations", "int8", "--precision", "f32"], 2, "`--activations int8` and `--precision f32`"),
        (["--max_seq_len", "1000000"], 2, "`--max_seq_len` beyond the positions"),
        (["--config", "absent.toml"], 2, "the Checkpoint or the recipe does not exist"),
    ],
)
def test_options(
    checkpoint: Path, tmp_path: Path, options: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")]
    assert app.run([*command, "--no_autotune", *options]) == code
    assert not (tmp_path / "e").exists()
    _in_the_table(words, code)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_flip, "a file of the Checkpoint is damaged"),
        (_other_format, "a version of ingot with another format"),
        (_no_checkpoint, "the directory is not a Checkpoint"),
    ],
)
def test_checkpoints(checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    copy = tmp_path / "c"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damage(copy)
    command = ["build", "--checkpoint_dir", str(copy), "--output_dir", str(tmp_path / "e"), "--no_autotune"]
    assert app.run(command) == 1
    _in_the_table(words, 1)


def test_paths(checkpoint: Path, tmp_path: Path) -> None:
    """An absent Checkpoint, and a directory that holds something else."""
    assert app.run(["build", "--checkpoint_dir", str(tmp_path / "absent"), "--output_dir", str(tmp_path / "e")]) == 2
    _in_the_table("the Checkpoint or the recipe does not exist", 2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    assert app.run(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "full")]) == 2
    assert (tmp_path / "full/file").read_text() == "mine"
    _in_the_table("the output directory holds other files", 2)


def test_an_engine(checkpoint: Path, tmp_path: Path) -> None:
    command = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e"), "--no_autotune"]
    assert app.run([*command, "--target", "ref"]) == 0
    _in_the_table("the engine is written", 0)


def _in_the_table(words: str, code: int) -> None:
    assert [line for line in TABLE.splitlines() if line.startswith(f"| {code} |") and words in line], words
