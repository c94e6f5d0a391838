"""What must have a test of its own: every op, every pass, every family, every command, every example."""

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


@pytest.mark.parametrize("tests", ["tests/convert/test_golden.py", "tests/e2e/test_families.py"])
def test_every_family_is_compared_with_transformers(tests: str) -> None:
    assert "family_names()" in (ROOT / tests).read_text()
