"""Figures that a later run takes."""

from pathlib import Path

import pytest

from ingot.advise.measured import Measured
from ingot.errors import UsageError


def fail() -> float:
    raise AssertionError("it is known")


def test_a_figure_is_measured_once(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    assert Measured(file, "this").get_or_measure("a", lambda: 1.5) == 1.5
    assert Measured(file, "this").get_or_measure("a", fail) == 1.5
    assert Measured(file, "other").get_or_measure("a", lambda: 2.5) == 2.5
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]
    assert Measured(None, "this").get_or_measure("a", lambda: 3.5) == 3.5


@pytest.mark.parametrize("text", ["", "{}", '{"advise": 9}', "[1]", '{"advise": 1, "figures": 3, "made_of": ""}'])
def test_another_file_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="has not written"):
        Measured(file, "this")
    assert file.read_text() == text


def test_a_place_that_takes_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        Measured(tmp_path / "absent" / "m.json", "this").get_or_measure("a", lambda: 1.0)
