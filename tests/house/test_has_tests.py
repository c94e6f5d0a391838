"""What must have a test of its own: every op, every pass, every family, every command, every example."""

import ast
import re
from pathlib import Path

import pytest

from tests.house.project import ROOT


def _sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).glob("*.py")) if path.stem not in ("__init__", "base")]


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        pytest.param(source, tests, id=f"{folder}/{source.name}")
        for folder, tests in (("plugins/ops", "tests/plugins/ops"), ("builder/passes", "tests/passes"))
        for source in _sources(folder)
    ],
)
def test_every_op_and_pass_has_a_test_file(source: Path, tests: str) -> None:
    found = list((ROOT / tests).rglob(f"test_{source.stem}.py"))
    assert len(found) == 1, f"write {tests}/.../test_{source.stem}.py"
    assert "def test_" in found[0].read_text()


def test_the_pipeline_names_every_pass() -> None:
    """It is the table of contents: who reads it knows which passes there are, and their order."""
    tree = ast.parse((ROOT / "builder/pipeline.py").read_text())
    named = set(re.findall(r"\w+", ast.get_docstring(tree) or ""))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ingot.builder.passes"):
            named |= {node.module.split(".")[-1] if node.module else "", *(each.name for each in node.names)}
    assert [source.stem for source in _sources("builder/passes") if source.stem not in named] == []


@pytest.mark.parametrize("tests", ["tests/convert/test_golden.py", "tests/e2e/test_families.py"])
def test_every_family_is_compared_with_transformers(tests: str) -> None:
    assert "family_names()" in (ROOT / tests).read_text()
