"""KV memory: what is granted by default, what is refused and with which words."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ingot.configs.sizes import format_bytes, parse_bytes
from ingot.dtypes import DType
from ingot.errors import CapacityError, UsageError
from ingot.plan import CacheGroup, Limits
from ingot.runtime.memory import available_memory, fits_beside, kv_budget, peak_memory

LAYOUT = CacheGroup(layers=(0, 1), kv_heads=2, head_dim=8, tokens_per_block=16, dtype=DType.F32)
LIMITS = Limits(max_batch_size=4, max_input_len=64, max_seq_len=65, max_num_tokens=64, max_logit_rows=4)
BLOCK = LAYOUT.block_bytes


def test_the_peak_is_that_of_this_process() -> None:
    """A small process that a large one starts."""
    command = "from ingot.runtime.memory import peak_memory; print(peak_memory())"
    large = np.ones(1 << 29, np.uint8)
    assert peak_memory() > large.nbytes
    assert int(subprocess.check_output([sys.executable, "-c", command])) < large.nbytes


def test_default_is_the_whole_batch_or_forty_percent() -> None:
    assert kv_budget((LAYOUT,), LIMITS, None, 10**12).num_blocks == (4 * 4,)
    scarce = kv_budget((LAYOUT,), LIMITS, None, 20 * BLOCK)
    assert (scarce.num_blocks, scarce.nbytes) == ((8,), 8 * BLOCK)


def test_blocks_of_int8_count_codes_and_scales() -> None:
    layout = dataclasses.replace(LAYOUT, dtype=DType.I8)
    assert layout.block_bytes == 2 * 2 * 16 * ((8 + 4) + (16 + 4))  # values are padded to 16 dims
    assert kv_budget((layout,), LIMITS, 8 * BLOCK, 10**12).num_blocks == (8 * BLOCK // 2048,)


def test_given_memory_is_used_in_full() -> None:
    assert kv_budget((LAYOUT,), LIMITS, 99 * BLOCK + 1, 10**12).num_blocks == (99,)


@pytest.mark.parametrize(
    ("wanted", "available", "words"),
    [
        (None, 9 * BLOCK, "40 % of the available memory"),
        (4 * BLOCK - 1, 10**12, "too small for one sequence"),
        (8 * BLOCK, 7 * BLOCK, "more than this machine has left"),
    ],
)
def test_too_little_is_refused(wanted: int | None, available: int, words: str) -> None:
    with pytest.raises(CapacityError, match=words):
        kv_budget((LAYOUT,), LIMITS, wanted, available)


def test_what_lies_beside_the_kv_cache_leaves_enough_for_one_sequence() -> None:
    least = next(n for n in range(100) if fits_beside(0, (LAYOUT,), LIMITS, None, n * BLOCK))
    assert least > 2
    assert fits_beside(7 * BLOCK, (LAYOUT,), LIMITS, None, (least + 7) * BLOCK)
    assert not fits_beside(7 * BLOCK, (LAYOUT,), LIMITS, None, (least + 6) * BLOCK)
    assert not fits_beside(100 * BLOCK, (LAYOUT,), LIMITS, None, BLOCK)
    assert fits_beside(7 * BLOCK, (LAYOUT,), LIMITS, 8 * BLOCK, 15 * BLOCK)
    assert not fits_beside(7 * BLOCK + 1, (LAYOUT,), LIMITS, 8 * BLOCK, 15 * BLOCK)


WINDOWED = CacheGroup(window=17, layers=(2, 3, 4), kv_heads=2, head_dim=8, tokens_per_block=16, dtype=DType.F32)
FULL = dataclasses.replace(LAYOUT, layers=(0, 1))
LONG = dataclasses.replace(LIMITS, max_seq_len=1601, max_num_tokens=32)
ONE, ONE_WINDOW = 100, 3 + 2  # blocks of one sequence, and of one in the windows' pool with the tokens of a step


def test_groups_with_windows_need_little_for_long_sequences() -> None:
    budget = kv_budget((FULL, WINDOWED), LONG, None, 10**12)
    assert budget.num_blocks == (4 * ONE, 4 * 3 + 2)
    assert budget.nbytes == 4 * ONE * FULL.block_bytes + 14 * WINDOWED.block_bytes
    together = dataclasses.replace(FULL, layers=tuple(range(5)))
    assert 2 * budget.nbytes < kv_budget((together,), LONG, None, 10**12).nbytes


def test_each_kind_of_groups_gets_half_but_no_more_than_it_needs() -> None:
    groups, both = (FULL, WINDOWED), 2 * WINDOWED.block_bytes + 3 * FULL.block_bytes  # twice the same bytes
    assert 3 * FULL.block_bytes == 2 * WINDOWED.block_bytes
    assert kv_budget(groups, LONG, 500 * both, 10**12).num_blocks == (1500, 1000), "more than enough for all"
    scarce = (both - 2 * WINDOWED.block_bytes) // 3 * 150 + 10 * WINDOWED.block_bytes
    assert kv_budget(groups, LONG, scarce, 10**12).num_blocks == (150 - 6, 14), "the windows have enough"
    least = ONE * FULL.block_bytes + ONE_WINDOW * WINDOWED.block_bytes
    assert kv_budget(groups, LONG, least, 10**12).num_blocks == (ONE, ONE_WINDOW)
    with pytest.raises(CapacityError, match=r"100 blocks of 16 tokens(.|\n)*, 5 blocks of 16 tokens"):
        kv_budget(groups, LONG, least - 1, 10**12)


def test_short_sequences_share_evenly() -> None:
    """Half of the memory for each kind: as if it had been divided for their length, or at least half as good."""
    short = dataclasses.replace(LIMITS, max_batch_size=1000)
    wanted = 1200 * FULL.block_bytes
    assert kv_budget((FULL, WINDOWED), short, wanted, 10**12).num_blocks == (600, 400)
    windows = (dataclasses.replace(WINDOWED, layers=(0,)), dataclasses.replace(WINDOWED, window=49, layers=(1,)))
    found = kv_budget(windows, LONG, 1000 * windows[0].block_bytes, 10**12).num_blocks
    assert sum(found) <= 1000
    assert found[0] * (5 + 2) == pytest.approx(found[1] * (3 + 2), rel=0.05), "pools of a kind, as one sequence needs"


def test_available_memory_minds_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    assert available_memory(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_memory(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("4000\n")
    assert available_memory(meminfo, tmp_path) == 3000
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 600\nactive_file 50\n")
    assert available_memory(meminfo, tmp_path) == 3600
    (tmp_path / "memory.current").write_text("9000\n")
    assert available_memory(meminfo, tmp_path) == 0, "more is in use than the container may have"
    assert available_memory() > 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2 << 30), ("1.5 kb", 1500), ("1000", 1000), (7, 7), ("3M", 3 << 20), ("512MiB", 512 << 20)],
)
def test_parse_bytes(text: int | str, count: int) -> None:
    assert parse_bytes(text, name="memory") == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", 0, -5, True, "1 2", "9" * 400])
def test_parse_bytes_refuses(text: int | str) -> None:
    with pytest.raises(UsageError, match="memory"):
        parse_bytes(text, name="memory")


def test_format_bytes() -> None:
    assert [format_bytes(count) for count in (5, 2048, 3 << 29)] == ["5 bytes", "2 KiB", "1.5 GiB"]
