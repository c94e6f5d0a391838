"""RuntimeConfig from what users write: each value in its own field, and amounts of memory in bytes."""

import dataclasses
from typing import Any

import pytest

from ingot.configs.runtime import Policy, RuntimeConfig, runtime_config
from ingot.configs.sizes import format_bytes, parse_bytes
from ingot.configs.speculation import Speculation
from ingot.errors import UsageError


def test_every_value_reaches_its_field() -> None:
    given: dict[str, Any] = {
        "rank": 1,
        "threads": 2,
        "isa": "avx2",
        "target": "cpu/avx2",
        "max_batch_size": 3,
        "max_num_tokens": 4,
        "max_seq_len": 5,
        "enable_prefix_cache": False,
        "enable_chunked_prefill": False,
        "tpot_target": 6.5,
        "use_mmap": True,
        "rank_timeout": 7.5,
        "collectives": "mpi",
    }
    speculation = {"method": "draft_model", "model": "engine", "num_speculative_tokens": 3}
    found = runtime_config(**given, kv_cache_memory="2MB", policy="guaranteed_no_evict", speculative_config=speculation)
    values = {name: value for name, value in dataclasses.asdict(found).items() if name != "speculation"}
    assert values == {**given, "kv_cache_memory": 2_000_000, "policy": Policy.GUARANTEED_NO_EVICT}
    assert found.speculation == Speculation(method="draft_model", model="engine", num_speculative_tokens=3)
    assert runtime_config() == RuntimeConfig()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1000", 1000),
        (7, 7),
        ("1.5GB", 1_500_000_000),
        ("512 MiB", 512 << 20),
        ("2g", 2 << 30),
        ("3kb", 3000),
        ("1 TiB", 1 << 40),
        ("4m", 4 << 20),
        ("5MB", 5_000_000),
        ("6k", 6 << 10),
        ("1t", 1 << 40),
        ("2tb", 2 * 10**12),
    ],
)
def test_amounts_of_memory(text: int | str, count: int) -> None:
    assert parse_bytes(text, name="--max_mem") == count


@pytest.mark.parametrize("text", ["", "GiB", "1 XB", "-1", "0", 0, True, "1.GiB"])
def test_what_is_no_amount(text: int | str) -> None:
    with pytest.raises(UsageError, match="--max_mem"):
        parse_bytes(text, name="--max_mem")


def test_amounts_in_words() -> None:
    assert [format_bytes(count) for count in (1023, 1024, 3 << 29, 5 << 40, 5 << 50)] == [
        "1023 bytes",
        "1 KiB",
        "1.5 GiB",
        "5 TiB",
        "5120 TiB",
    ]
