"""What work will need is said before it starts, and held against what it may use."""

from pathlib import Path

import pytest

from ingot.errors import CapacityError
from ingot.resource_estimate import ResourceEstimate


def test_is_a_sentence() -> None:
    estimate = ResourceEstimate(memory=100 << 20, disk=3 << 30, free=7 << 30)
    assert str(estimate) == "needs at most 100 MiB of memory and 3 GiB of disk (7 GiB of disk are free)"


def test_free_space_is_that_of_the_nearest_folder_there_is(tmp_path: Path) -> None:
    here, below = (ResourceEstimate.at(target, memory=1, disk=1) for target in (tmp_path, tmp_path / "a" / "b" / "c"))
    assert below.free == pytest.approx(here.free, rel=0.1)
    assert here.free > 0


def test_memory_is_held_against_max_mem() -> None:
    estimate = ResourceEstimate(memory=(100 << 20) + 1, disk=1, free=1)
    estimate.check_memory(None)
    estimate.check_memory(101 << 20)
    estimate.check_memory(estimate.memory)
    with pytest.raises(CapacityError):
        estimate.check_memory(estimate.memory - 1)
    with pytest.raises(CapacityError, match=r"100 MiB(.|\n)*got: 64 MiB(.|\n)*--max_mem 101MiB"):
        estimate.check_memory(64 << 20)
