"""One table of exit codes, which every command keeps."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ingot.cli import app
from ingot.cli.exit_codes import DONE, EXIT_CODES, FAILED, INTERRUPTED, READER_LEFT, WRONG_USE, exit_code
from ingot.errors import BuildError, EngineError, IngotError, MissingEngineError, MissingModelError, UsageError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), WRONG_USE),
        (MissingEngineError("x"), WRONG_USE),
        (MissingModelError("x"), WRONG_USE),
        (click.UsageError("x"), WRONG_USE),
        (EngineError("x"), FAILED),
        (BuildError("x"), FAILED),
        (IngotError("x"), FAILED),
        (OSError("x"), FAILED),
        (ZeroDivisionError("x"), FAILED),
        (KeyboardInterrupt(), INTERRUPTED),
        (BrokenPipeError(), READER_LEFT),
    ],
)
def test_the_table_gives_the_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code
    assert EXIT_CODES[code].endswith(".")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "--max_batch_size", "many"], "'many' is not a whole number"),
        (["bench", "serve", "--rate", "fast"], "'fast' is not a number"),
    ],
)
def test_kinds_of_numbers_in_plain_words(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(arguments) == WRONG_USE
    assert words in capsys.readouterr().err


def test_help_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["help", "exit_codes"]) == DONE
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line[:3].strip().isdigit()] == list(map(str, EXIT_CODES))


def test_an_interrupt_inside_of_eval_keeps_the_code(tmp_path: Path) -> None:
    """As in the import of a module that makes a namedtuple: Python would end `python -m` by the signal instead."""
    (tmp_path / "interrupted_command.py").write_text(
        "import os, signal\n"
        "from ingot.cli import app\n"
        "app.group.main = lambda *args, **options: eval('os.kill(os.getpid(), signal.SIGINT) or list(range(9))')\n"
        "app.main()\n"
    )
    command = [sys.executable, "-m", "interrupted_command"]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert (result.returncode, result.stderr) == (INTERRUPTED, "interrupted\n")


@pytest.mark.parametrize("arguments", [["doctor"], ["--version"], ["inspect", "no-such-engine"]])
def test_standard_output_that_is_closed(arguments: list[str]) -> None:
    """Nobody reads what is printed, and the work is done."""
    command = ["sh", "-c", f"exec {sys.executable} -m ingot {' '.join(arguments)} >&-"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert result.returncode == (WRONG_USE if "inspect" in arguments else DONE)
    assert "internal error" not in result.stderr


@pytest.mark.parametrize("option", ["--model_dir", "--output_dir"])
def test_empty_paths(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A variable without a value must not mean this directory."""
    paths = {"--model_dir": "a", "--output_dir": "b", option: ""}
    assert app.run(["convert", *(each for pair in paths.items() for each in pair)]) == WRONG_USE
    assert "the path is empty" in capsys.readouterr().err


def test_files_that_are_no_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}")
    for option in ("--json_schema", "--grammar"):
        given = ["run", "--engine_dir", "e", "--prompt", "a", option, str(tmp_path / "binary")]
        assert app.run(given) == WRONG_USE
        assert "not a text in UTF-8" in capsys.readouterr().err
    assert app.run(["run", "--engine_dir", "e", "--input_file", str(tmp_path / "none")]) == WRONG_USE


def test_doctor_fails_for_what_runs_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["doctor", "no-such-engine"]) == FAILED
    assert "there is no engine directory" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--batch_invariant"])
def test_options_that_are_to_come(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["build", option]) == WRONG_USE
    assert f"there is no option {option} yet" in capsys.readouterr().err
