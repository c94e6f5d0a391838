"""verify reads every byte and names every damaged part."""

import shutil
from pathlib import Path

import pytest

from ingot.errors import EngineError
from ingot.verify import verify
from tests.hall.test_engine import flip, pristine

__all__ = ["pristine"]


@pytest.fixture
def engine(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "engine"))


def test_a_sound_engine(engine: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = verify(engine, progress=lambda *each: seen.append(each))
    assert report.nbytes == sum(part.nbytes for part in report.manifest.parts) == seen[-1][1] == seen[-1][2]


def test_every_damaged_part_is_named(engine: Path) -> None:
    flip(engine / "rank0.engine", 4096 * 100)
    flip(engine / "tokenizer.json", 3)
    with pytest.raises(EngineError, match=r"SHA-256 differs(.|\n)*rank0.engine(.|\n)*tokenizer.json"):
        verify(engine)


def test_a_truncated_part(engine: Path) -> None:
    with (engine / "rank0.engine").open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(EngineError, match="truncated"):
        verify(engine)
