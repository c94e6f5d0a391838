"""Copies of weights: what lies in them, where it lies, who read it in, and that the file may change behind them."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from ingot.chunks import CHUNK_BYTES
from ingot.engine import open_engine
from ingot.engine_writer import RankFile, write_engine
from ingot.errors import CapacityError, EngineError
from ingot.plan import Plan
from ingot.weights_memory import HUGE_PAGE, NumaPlacement, huge_pages, offers_huge_pages
from tests.hall.test_engine import flip, make_manifest, make_plan

CORES = frozenset(os.sched_getaffinity(0))
ANYWHERE = NumaPlacement(cores=(CORES,), node=lambda offset: 0)
SIZES = (1000, CHUNK_BYTES - HUGE_PAGE, CHUNK_BYTES - HUGE_PAGE + 1, 3 * CHUNK_BYTES + 77)


@pytest.fixture(params=SIZES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An engine with as many random bytes of weights."""
    return write(tmp_path, request.param)


def write(folder: Path, size: int) -> Path:
    plan = dataclasses.replace(make_plan(), weight_bytes=size)
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    (folder / "e").mkdir()
    content = RankFile(plans={"ref": plan}, blocks=[(0, data.data)])
    write_engine(folder / "e", make_manifest(), [content], [])
    return folder / "e"


def test_a_copy_holds_what_is_mapped(engine: Path) -> None:
    for placement in (ANYWHERE, NumaPlacement(cores=(CORES, CORES), node=lambda offset: offset // CHUNK_BYTES % 2)):
        with open_engine(engine) as mapped, open_engine(engine, placement=lambda plan: placement) as copied:  # noqa: B023
            np.testing.assert_array_equal(mapped.weights, copied.weights)
            assert copied.weights.ctypes.data % HUGE_PAGE == 0
            assert not copied.weights.flags.writeable


def test_a_file_that_is_cut_behind_a_copy_changes_nothing(engine: Path) -> None:
    with open_engine(engine) as opened:
        before = opened.weights.copy()
    with open_engine(engine, placement=lambda plan: ANYWHERE) as copied:
        os.truncate(engine / "rank0.engine", 0)
        np.testing.assert_array_equal(copied.weights, before)


@pytest.mark.daily(1)
def test_damage_is_found_while_copying(engine: Path) -> None:
    rank = engine / "rank0.engine"
    size = rank.stat().st_size
    for offset in {HUGE_PAGE, HUGE_PAGE + 1, min(CHUNK_BYTES, size - 1), size // 2, size - 1}:
        flip(rank, offset)
        with pytest.raises(EngineError, match="checksum does not match"):
            open_engine(engine, placement=lambda plan: ANYWHERE)
        flip(rank, offset)
    open_engine(engine, placement=lambda plan: ANYWHERE)


@pytest.mark.slow
def test_parts_are_read_in_by_the_cores_of_their_nodes(tmp_path: Path) -> None:
    """Two nodes that were given different cores where there are two: the one that makes a checksum reads the part."""
    engine = write(tmp_path, 5 * CHUNK_BYTES)
    first, second = frozenset([min(CORES)]), frozenset([max(CORES)])
    placement = NumaPlacement(cores=(first, second), node=lambda offset: offset // CHUNK_BYTES % 2)
    asked: list[Plan] = []
    seen: dict[int, set[int]] = {}
    with open_engine(engine) as mapped:
        places = {mapped.weights[n * CHUNK_BYTES + HUGE_PAGE :][:8].tobytes(): n for n in range(5)}

    def crc32(data: memoryview) -> int:
        if (place := places.get(bytes(data[:8]))) is not None:
            seen[place] = os.sched_getaffinity(0)
        return 0

    def choose(plan: Plan) -> NumaPlacement:
        asked.append(plan)
        return placement

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ingot.engine._Check._refuse", lambda self, chunk, bad: None)
        open_engine(engine, crc32=crc32, placement=choose)
    assert [plan.weight_bytes for plan in asked] == [5 * CHUNK_BYTES]
    assert seen == {n: (first, second)[(n * CHUNK_BYTES + HUGE_PAGE) // CHUNK_BYTES % 2] for n in seen}
    assert len(seen) >= 4


def test_a_system_that_forbids_cores_still_reads(tmp_path: Path) -> None:
    engine = write(tmp_path, 2 * CHUNK_BYTES)
    nowhere = NumaPlacement(cores=(frozenset([4095]),), node=lambda offset: 0)
    with open_engine(engine) as mapped, open_engine(engine, placement=lambda plan: nowhere) as copied:
        np.testing.assert_array_equal(mapped.weights, copied.weights)


def test_no_placement_means_mapped(tmp_path: Path) -> None:
    engine = write(tmp_path, 1000)
    with open_engine(engine, placement=lambda plan: None) as mapped:
        before = bytes(mapped.weights[:8])
        flip(engine / "rank0.engine", HUGE_PAGE)
        assert bytes(mapped.weights[:8]) != before


def test_huge_pages_are_zeros_at_whole_pages() -> None:
    for size in (1, HUGE_PAGE, 3 * HUGE_PAGE + 5):
        memory = huge_pages(size)
        assert memory.shape == (size,)
        assert memory.ctypes.data % HUGE_PAGE == 0
        assert not memory.any()
        memory[:] = 7  # all of it can be written
    with pytest.raises(CapacityError, match=r"address space(.|\n)*--use_mmap"):
        huge_pages(1 << 60)


@pytest.mark.parametrize(
    ("text", "offered"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("always madvise [never]", False)],
)
def test_what_the_system_says_of_huge_pages(tmp_path: Path, text: str, offered: bool) -> None:
    setting = tmp_path / "enabled"
    assert not offers_huge_pages(setting)
    setting.write_text(text + "\n")
    assert offers_huge_pages(setting) == offered
