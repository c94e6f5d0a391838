"""Every example is short, and runs on the shipped model."""

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

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "compare_engines.py": "| decode |",
    "generate.py": "blocks in use afterwards: 0",
    "inspect_engine.py": "matmul.",
    "logits.py": "perplexity",
    "precisions.py": "| `w4g128` | 3.05 MB |",
    "stream.py": "prefill tokens and decode rows of each step: [[",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("examples")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "checkpoint"))
    build(BuildConfig(), work / "checkpoint", work / "engine")
    return work / "engine"


def test_there_is_a_check_for_each() -> None:
    assert {path.name for path in EXAMPLES} == set(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path: Path, engine: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    arguments: dict[str, list[object]] = {
        "compare_engines.py": [engine, engine, "--input_len", 20, "--output_len", 4, "--rounds", 2],
        "precisions.py": [SHIPPED, SAMPLE_TEXT],
    }
    given = arguments.get(path.name, [engine])
    command = [sys.executable, "-W", "error", str(path), *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert SAYS[path.name] in done.stdout
