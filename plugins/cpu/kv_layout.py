"""Numbers of a block's heads ↔ how they lie in a CPU session's KV cache: the definition for every kernel.

    keys    [kv_heads][tokens_per_block / 16][head_dim / pair][16 tokens][pair]
    values  [kv_heads][padded_dim / 16][tokens_per_block / pair][16 dims][pair]

pair: two dims of a key, two tokens of a value, in a bf16 cache; else 1. A line of 16 pairs is a row of the right
operand of an AMX product, and 16 lines are one of its tiles. Behind the codes of each head of a cache of codes lie the
scales of its tokens, float32 [tokens_per_block]. Rows of tokens lie one after another in a latent group.
"""

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, from_float32, to_float32
from ingot.plan import CacheGroup

LANES = 16

Array = npt.NDArray[np.float32]


def pack_keys(numbers: Array, scales: Array, layout: CacheGroup) -> bytes:
    """Keys of a block, [kv_heads, tokens_per_block, head_dim]; scales [kv_heads, tokens_per_block], of codes."""
    lines = numbers.reshape(layout.kv_heads, -1, LANES, layout.head_dim // _pair(layout), _pair(layout))
    return _stored(lines.transpose(0, 1, 3, 2, 4), scales, layout)


def pack_values(numbers: Array, scales: Array, layout: CacheGroup) -> bytes:
    """Values of a block, [kv_heads, tokens_per_block, padded_dim]; scales as those of keys."""
    lines = numbers.reshape(layout.kv_heads, -1, _pair(layout), layout.padded_dim // LANES, LANES)
    return _stored(lines.transpose(0, 3, 1, 4, 2), scales, layout)


def unpack_keys(data: bytes, layout: CacheGroup) -> tuple[Array, Array]:
    """Inverse of `pack_keys`: numbers and scales, which are 1 where the cache has none."""
    numbers, scales = _numbers(data, layout)
    lines = numbers.reshape(layout.kv_heads, -1, layout.head_dim // _pair(layout), LANES, _pair(layout))
    return lines.transpose(0, 1, 3, 2, 4).reshape(layout.kv_heads, layout.tokens_per_block, -1), scales


def unpack_values(data: bytes, layout: CacheGroup) -> tuple[Array, Array]:
    """Inverse of `pack_values`."""
    numbers, scales = _numbers(data, layout)
    lines = numbers.reshape(layout.kv_heads, layout.padded_dim // LANES, -1, LANES, _pair(layout))
    return lines.transpose(0, 2, 4, 1, 3).reshape(layout.kv_heads, layout.tokens_per_block, -1), scales


def unpack_rows(data: bytes, layout: CacheGroup) -> Array:
    """The rows of a block of a latent group, [1, tokens_per_block, head_dim]."""
    numbers = to_float32(np.frombuffer(data, layout.dtype.storage), layout.dtype)
    return numbers.reshape(1, layout.tokens_per_block, layout.head_dim)


def _pair(layout: CacheGroup) -> int:
    return 2 if layout.dtype is DType.BF16 else 1


def _stored(lines: Array, scales: Array, layout: CacheGroup) -> bytes:
    """lines [kv_heads, ...] in their order."""
    codes = from_float32(np.ascontiguousarray(lines), layout.dtype)
    if not layout.has_codes:
        return codes.tobytes()
    return b"".join(codes[head].tobytes() + scales[head].tobytes() for head in range(layout.kv_heads))


def _numbers(data: bytes, layout: CacheGroup) -> tuple[Array, Array]:
    """(numbers [kv_heads, .], scales [kv_heads, tokens_per_block]) of a block."""
    size = layout.tokens_per_block
    if not layout.has_codes:
        numbers = to_float32(np.frombuffer(data, layout.dtype.storage), layout.dtype)
        return numbers.reshape(layout.kv_heads, -1), np.ones((layout.kv_heads, size), np.float32)
    heads = np.frombuffer(data, np.uint8).reshape(layout.kv_heads, -1)
    codes, scales = np.split(heads, [-layout.scale_bytes * size], axis=1)
    return to_float32(np.ascontiguousarray(codes).view(layout.dtype.storage), layout.dtype), np.ascontiguousarray(
        scales
    ).view(np.float32)
