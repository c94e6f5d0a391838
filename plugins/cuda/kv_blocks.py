"""A block of the KV cache as kernels keep it, and its numbers: [kv_heads][tokens_per_block][dims]. If the cache has
codes, the float32 scales of a head's tokens follow the codes of the head."""

import numpy as np
import numpy.typing as npt

from ingot.dtypes import from_float32, to_float32
from ingot.plan import CacheGroup
from ingot.step_io import Float32

Bytes = npt.NDArray[np.uint8]


def unpack(data: Bytes, kv: CacheGroup, dims: int) -> tuple[Float32, Float32]:
    """(numbers or codes [..., kv_heads, tokens_per_block, dims], their scales [..., kv_heads, tokens_per_block]) of
    blocks. dims: of a row in memory, its padding included."""
    tokens, size = kv.tokens_per_block, kv.tokens_per_block * dims * kv.dtype.itemsize
    heads = data.reshape(*data.shape[:-1], kv.kv_heads, size + tokens * kv.scale_bytes)
    stored = np.ascontiguousarray(heads[..., :size]).view(kv.dtype.storage)
    numbers = to_float32(stored, kv.dtype)
    shape = (*heads.shape[:-1], tokens)
    scales = np.ones(shape, np.float32)
    if kv.scale_bytes:
        scales = np.ascontiguousarray(heads[..., size:]).view(np.float32).reshape(shape)
    return numbers.reshape(*shape, dims), scales


def pack(numbers: Float32, scales: Float32, kv: CacheGroup) -> Bytes:
    """Bytes of blocks: `unpack` the other way round."""
    codes = from_float32(np.ascontiguousarray(numbers, np.float32), kv.dtype)
    heads = np.ascontiguousarray(codes).reshape(*numbers.shape[:-2], -1).view(np.uint8)
    if kv.scale_bytes:
        heads = np.concatenate([heads, np.ascontiguousarray(scales, np.float32).view(np.uint8)], axis=-1)
    return heads.reshape(*heads.shape[:-2], -1)
