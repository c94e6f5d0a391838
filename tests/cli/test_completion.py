"""Completion: each shell gets its script, and the words that it offers are those of the commands."""

import os
import shutil
import subprocess
import sys

import pytest

from ingot.cli import app


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("there is no bash")
    assert app.run(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert f"_INGOT_COMPLETE={shell}_complete" in out


def _offered(*words: str) -> list[str]:
    """What bash would be offered for the last of the words, by the very call that its script makes."""
    given = {
        "COMP_WORDS": " ".join(("ingot", *words)),
        "COMP_CWORD": str(len(words)),
        "_INGOT_COMPLETE": "bash_complete",
    }
    done = subprocess.run(
        [sys.executable, "-m", "ingot"], env={**os.environ, **given}, capture_output=True, text=True, check=False
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_commands_options_and_values_are_offered() -> None:
    assert _offered("b") == ["build", "bench"]
    assert _offered("bench", "la") == ["latency"]
    assert "--max_seq_len" in _offered("build", "--max_s")
    assert _offered("run", "--isa", "avx5") == ["avx512", "avx512bf16"]
    assert _offered("help", "exit") == ["exit_codes"]
