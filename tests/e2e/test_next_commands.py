"""The commands that convert, build and quickstart print as the next ones work as they are printed."""

import shlex
import subprocess
from pathlib import Path

import click
import pytest

from ingot.cli import app
from ingot.cli import quickstart as cli
from tests.e2e.command import ingot


def test_the_program_is_started_as_this_one_was() -> None:
    words = shlex.split(cli._program())
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ingot")


@pytest.mark.parametrize("can_serve", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_after_a_quickstart(kept: bool, can_serve: bool, shipped_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_program", lambda: "ingot")
    lines = cli.next_commands(shipped_engine if kept else None, can_serve=can_serve)
    first, second = (shlex.split(line, comments=True) for line in lines)
    assert [first[1], second[1]] == [("serve" if can_serve else "run") if kept else "quickstart", "convert"]
    for _, name, *rest in (first, second):
        command = app.group.get_command(click.Context(app.group, info_name="ingot"), name)
        assert command is not None
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= known
    if first[1] == "run":
        assert ingot(*first[1:], "--max_output_len", 4).succeeds().out.strip()


@pytest.mark.slow
def test_after_convert_and_build(tmp_path: Path, shipped_checkpoint: Path) -> None:
    place = tmp_path / "an engine"
    built = ingot("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", place).succeeds()
    _, _, line = built.err.rpartition("next    ingot ")
    assert ingot(*shlex.split(line), "--max_output_len", 4).succeeds().out.strip()


def test_a_dry_run_names_no_engine_that_is_not_there(tmp_path: Path, shipped_checkpoint: Path) -> None:
    done = ingot("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e", "--dry_run")
    assert "would write" in done.succeeds().err
    assert "next" not in done.err
