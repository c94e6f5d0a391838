"""How numbers lie in a block of a KV cache, and whether so many blocks fit into the machine."""

import os

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import CapacityError
from ingot.plan import CacheGroup
from ingot.plugins.cpu.kv_layout import pack_keys, pack_values, unpack_keys, unpack_values
from ingot.plugins.cpu.machine import check_memory
from tests.hall.test_engine import make_plan


def layout_of(dtype: DType) -> CacheGroup:
    return CacheGroup(layers=(0,), kv_heads=3, head_dim=20, tokens_per_block=32, dtype=dtype)


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16, DType.I8, DType.F8])
def test_what_was_packed_comes_back(dtype: DType) -> None:
    layout, generator = layout_of(dtype), np.random.default_rng(1)
    scales = generator.random((3, 32), np.float32) if layout.has_codes else np.ones((3, 32), np.float32)
    for dim, size, pack, unpack in (
        (20, layout.k_block_bytes, pack_keys, unpack_keys),
        (32, layout.v_block_bytes, pack_values, unpack_values),
    ):
        most = 16 if dtype is DType.F8 else 100  # whole numbers that it holds
        numbers = generator.integers(-most, most, (3, 32, dim)).astype(np.float32)
        data = pack(numbers, scales, layout)
        assert len(data) == size
        for found, expected in zip(unpack(data, layout), (numbers, scales), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_lines_hold_sixteen_tokens_of_a_dim_or_of_a_pair_of_dims() -> None:
    numbers = np.arange(3 * 32 * 20, dtype=np.float32).reshape(3, 32, 20) % 128
    wide = np.frombuffer(pack_keys(numbers, numbers[..., 0], layout_of(DType.F32)), np.float32)
    np.testing.assert_array_equal(wide[16:32], numbers[0, :16, 1])
    half = np.frombuffer(pack_keys(numbers, numbers[..., 0], layout_of(DType.F16)), np.float16)
    np.testing.assert_array_equal(half[16:32], numbers[0, :16, 1])
    paired = np.frombuffer(pack_keys(numbers, numbers[..., 0], layout_of(DType.BF16)), np.uint16)
    narrow = (paired.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(narrow[32:64], numbers[0, :16, 2:4].reshape(-1))


def test_a_cache_larger_than_the_memory_is_refused() -> None:
    plan = make_plan()
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // plan.block_bytes
    check_memory(plan, (most,))
    with pytest.raises(CapacityError, match=f"{most + 1} blocks"):
        check_memory(plan, (most + 1,))
