"""The programs that a test can run: on the shipped model, small."""

import subprocess
import sys
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.builder.calibrate import SAMPLE_TEXT
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from tests.house.project import ROOT


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("programs")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "checkpoint"))
    build(BuildConfig(), work / "checkpoint", work / "engine")
    return work / "engine"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "error", "-m", f"tests.programs.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_engines_are_compared(engine: Path) -> None:
    text = run("compare_engines", engine, engine, "--input_len", 20, "--output_len", 4, "--rounds", 2)
    assert "1 x 20 tokens in, 4 out, 2 rounds in turn" in text
    assert [line.split(" | ")[0] for line in text.splitlines()[-2:]] == ["| prefill", "| decode"]


def test_each_precision_has_a_row(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(SAMPLE_TEXT.read_text()[:600])
    table = run("precisions", SHIPPED, text)
    assert table.count("\n| `") == 6
    assert "| `w4g128` | 3.05 MB |" in table
