"""What ranks have exchanged is put together as the ops say, bit for bit."""

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.plan import Rows
from ingot.plugins.cuda import exchanges, target
from ingot.plugins.cuda.compiler import Specialisation
from ingot.plugins.cuda.exchanges import column_begin, gather_work, reduce_work, share_begin
from ingot.plugins.cuda.gpu import Arguments, Device, find_gpus
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Exchange, Launch, Work
from ingot.plugins.op import Array
from ingot.plugins.ops import all_gather, all_reduce

CODE = Specialisation(weight=DType.F32, kv=DType.F32, head_dim=16, tokens_per_block=16)
NONE = np.float32(-7)


@contextlib.contextmanager
def _device() -> Iterator[tuple[Device, object]]:
    with contextlib.closing(Device(find_gpus().gpus[0])) as device:
        compile_kernels: Any = vars(target)["compile_kernels"]  # that of the PTX tests, too
        image = compile_kernels(CODE, "sm_90a", lambda what, done, total: None).image
        yield device, device.load(np.frombuffer(image, np.uint8))


def _counts(rows: int) -> Counts:
    return Counts(tokens=rows, logit_rows=rows, sequences=rows, decode=rows, prefill=0, longest=1)


def _launched(device: Device, module: object, work: Work, rows: int) -> None:
    assert isinstance(work, Launch)
    grid = work.grid(_counts(rows), 1)
    assert min(grid) > 0
    kernel = device.kernel(module, work.kernel, work.shared)
    device.launch(kernel, grid, work.threads, work.shared, Arguments(work.arguments))


def _parts(ranks: int, rows: int, cols: int) -> list[Array]:
    rng = np.random.default_rng(ranks * rows + cols)
    sizes = 10.0 ** rng.integers(-4, 4, ranks)
    return [(size * rng.standard_normal((rows, cols))).astype(np.float32) for size in sizes]


def check_sums(driver: ctypes.CDLL, ranks: int, rows: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers at once, then the share of each rank. What lies behind a result stays as it is."""
    parts = _parts(ranks, rows, cols)
    expected = all_reduce.reference(parts).reshape(-1)
    numbers = rows * cols
    with _device() as (device, module):
        y, scratch = device.allocate(4 * numbers + 64), device.allocate(4 * ranks * numbers)
        counts = device.allocate(8)
        device.upload(counts, np.array([rows, 0], np.int32))
        for place in (None, *sorted({0, ranks // 2, ranks - 1})):
            begin = 0 if place is None else share_begin(numbers, place, ranks)
            end = numbers if place is None else share_begin(numbers, place + 1, ranks)
            if begin == end:
                continue
            monkeypatch.setattr(exchanges, "MANY", numbers + 1 if place is None else 1)
            brought = np.stack([part.reshape(-1)[begin:end] for part in parts])
            device.upload(scratch, np.ascontiguousarray(brought))
            device.upload(y, np.full(numbers + 16, NONE, np.float32))
            at = {"y": y, "x": 0, "scratch": scratch, "counts": counts}
            work = reduce_work(**at, cols=cols, ranks=ranks, place=place or 0, rows=Rows.TOKENS)
            _launched(device, module, work[1 if place is None else 3], rows)
            found = np.empty(numbers + 16, np.float32)
            device.fetch(found, y)
            device.wait()
            np.testing.assert_array_equal(found[begin:end], expected[begin:end])
            assert (np.delete(found, np.s_[begin:end]) == NONE).all()


def check_columns(driver: ctypes.CDLL, ranks: int, rows: int, columns: int) -> None:
    begins = [column_begin(columns, rank, ranks) for rank in range(ranks + 1)]
    whole = _parts(1, rows, columns)[0]
    parts = [whole[:, begin:end] for begin, end in itertools.pairwise(begins)]
    with _device() as (device, module):
        y, scratch = device.allocate(whole.nbytes), device.allocate(whole.nbytes)
        device.upload(scratch, np.concatenate([part.reshape(-1) for part in parts]))
        work = gather_work(y=y, x=0, scratch=scratch, cols=columns, ranks=ranks, place=0, rows=Rows.LOGITS)
        _launched(device, module, work[1], rows)
        found = np.empty_like(whole)
        device.fetch(found, y)
        device.wait()
    np.testing.assert_array_equal(found, all_gather.reference(parts))


SUMS = ((2, 3, 21), (4, 2, 516), (8, 1, 1100), (16, 1, 64), (32, 3, 7), (64, 2, 512))
COLUMNS = ((2, 3, 67), (4, 2, 1030), (8, 1, 9), (3, 2, 8))


@pytest.mark.parametrize(("ranks", "rows", "cols"), SUMS)
def test_sums(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, ranks: int, rows: int, cols: int) -> None:
    check_sums(gpu, ranks, rows, cols, monkeypatch)


@pytest.mark.parametrize(("ranks", "rows", "columns"), COLUMNS)
def test_columns(gpu: ctypes.CDLL, ranks: int, rows: int, columns: int) -> None:
    check_columns(gpu, ranks, rows, columns)


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("numbers", [1, 3, 255, 4096, 70_001])
def test_shares_cover_all_numbers(ranks: int, numbers: int) -> None:
    begins = [share_begin(numbers, rank, ranks) for rank in range(ranks + 1)]
    assert [begins[0], begins[-1]] == [0, numbers]
    assert begins == sorted(begins)
    assert all(begin % 4 == 0 for begin in begins[:-1])


def test_what_ranks_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that exchanges.py states."""
    for many, factor in ((1 << 20, 7), (1, 2 * 7 / 8)):
        monkeypatch.setattr(exchanges, "MANY", many)
        work = reduce_work(y=0, x=0, scratch=0, counts=0, cols=1024, ranks=8, place=3, rows=Rows.TOKENS)
        got = sum(each.numbers(_counts(16)) for each in work if isinstance(each, Exchange))
        assert got == factor * 16 * 1024
