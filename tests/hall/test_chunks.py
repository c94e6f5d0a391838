"""Checksums by chunks: made while writing, checked while reading ranges; a damaged chunk gives out no byte."""

import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from ingot.chunks import CHUNK_BYTES, CheckedFile, Checksums, Summer
from ingot.errors import CheckpointError

SIZE = 2 * CHUNK_BYTES + 1000


@pytest.fixture(scope="module")
def data() -> bytes:
    """Two chunks and a part of one."""
    return np.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def path(data: bytes, tmp_path: Path) -> Path:
    """The same in a file."""
    (tmp_path / "x.bin").write_bytes(data)
    return tmp_path / "x.bin"


def sums_of(data: bytes, *cuts: int) -> Checksums:
    summer, position = Summer(), 0
    for cut in (*cuts, len(data)):
        summer.update(memoryview(data)[position:cut])
        position = cut
    return summer.finish()


@pytest.mark.parametrize("cuts", [(), (1,), (CHUNK_BYTES,), (7, CHUNK_BYTES - 1, CHUNK_BYTES + 1, SIZE - 1)])
def test_sums_do_not_depend_on_how_the_bytes_come(cuts: tuple[int, ...], data: bytes) -> None:
    sums = sums_of(data, *cuts)
    assert sums.nbytes == SIZE
    assert sums.problem() is None
    chunks = [data[begin : begin + CHUNK_BYTES] for begin in range(0, SIZE, CHUNK_BYTES)]
    assert [sums.crc32_of(chunk) for chunk in range(sums.chunks)] == [zlib.crc32(chunk) for chunk in chunks]


@pytest.mark.parametrize("size", [0, CHUNK_BYTES])
def test_a_chunk_that_was_not_started_has_no_sum(size: int) -> None:
    sums = sums_of(bytes(size))
    assert len(sums.crc32) == 8 * (size // CHUNK_BYTES)
    assert sums.problem() is None


@pytest.mark.parametrize(("nbytes", "crc32"), [(SIZE, "0" * 16), (SIZE, "0" * 32), (0, "0" * 8), (1, "")])
def test_every_chunk_has_a_sum(nbytes: int, crc32: str) -> None:
    problem = Checksums(nbytes=nbytes, crc32=crc32).problem()
    assert problem is not None
    assert f"{len(crc32) // 8} checksums for the " in problem


RANGES = [(0, SIZE), (0, 1), (5, CHUNK_BYTES), (CHUNK_BYTES - 1, 2), (CHUNK_BYTES, 10), (SIZE - 1, 1), (9, 0)]


def test_ranges_are_what_the_file_holds(data: bytes, path: Path) -> None:
    file = CheckedFile(path, sums_of(data))
    for offset, count in [*RANGES, *RANGES]:  # first to be checked, then known as sound
        assert file.read(offset, count) == data[offset : offset + count]
    file.close()


@pytest.mark.parametrize("flipped", [0, CHUNK_BYTES - 1, CHUNK_BYTES, SIZE - 1])
def test_a_flipped_bit_is_found_by_whoever_reads_its_chunk(flipped: int, data: bytes, path: Path) -> None:
    damaged = bytearray(data)
    damaged[flipped] ^= 4
    path.write_bytes(damaged)
    file, chunk = CheckedFile(path, sums_of(data)), flipped // CHUNK_BYTES
    for other in {0, 1, 2} - {chunk}:
        file.read(other * CHUNK_BYTES, 100)
    begin, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, SIZE)
    for offset in (begin, end - 1):
        with pytest.raises(CheckpointError, match=rf"damaged(.|\n)*x\.bin(.|\n)*bytes {begin} to {end}\n") as refused:
            file.read(offset, 1)
        assert refused.value.hint
    file.close()


def test_threads_read_at_once(data: bytes, path: Path) -> None:
    file, wrong = CheckedFile(path, sums_of(data)), list[int]()

    def work(seed: int) -> None:
        for offset in np.random.default_rng(seed).integers(0, SIZE - 100, 200).tolist():
            if file.read(offset, 100) != data[offset : offset + 100]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    file.close()


def test_a_file_that_became_shorter_is_refused(data: bytes, path: Path) -> None:
    file = CheckedFile(path, sums_of(data))
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        file.read(SIZE - 100, 50)
    file.close()
