"""Faults that tests plant in a copy of the kernels' sources."""

import shutil
from pathlib import Path

import pytest

from ingot.plugins.cuda import compiler


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, right: str, wrong: str) -> None:
    """Kernels are compiled from a copy below `folder` from now on, in which the only `right` of the file is `wrong`."""
    sources = Path(shutil.copytree(compiler.SOURCES, folder / "kernels"))
    text = (sources / file).read_text()
    assert text.count(right) == 1, "the place of the fault"
    (sources / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr(compiler, "SOURCES", sources)
