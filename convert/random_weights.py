"""Weights drawn from a seed: a model of an exact shape without its files, for sizing and benchmarks."""

import functools
import math
import statistics
import zlib
from collections.abc import Iterator

import numpy as np

from ingot.convert.weights import Bits, Shape
from ingot.dtypes import DType, from_float32

STANDARD_DEVIATION = 0.02


def random_blocks(name: str, shape: Shape, dtype: DType, seed: int, block: int) -> Iterator[Bits]:
    """Stored bits of weight `name`, flat: ones for the factors of norms, normally distributed for all others.

    The values depend on seed, name and shape alone, not on the order in which weights are drawn. block is even.
    """
    is_factor = name.endswith("norm/weight")
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    size = math.prod(shape)
    for begin in range(0, size, block):
        count = min(block, size - begin)
        if is_factor:
            yield from_float32(np.ones(count, dtype=np.float32), dtype)
        else:
            draws = np.frombuffer(generator.bytes(2 * count), np.uint16)
            yield np.take(_normal_values(dtype), draws)


@functools.cache
def _normal_values(dtype: DType) -> Bits:
    """The values that cut a normal distribution into 65536 parts of one probability: a table is drawn from ten times
    as fast as the distribution itself."""
    normal, parts = statistics.NormalDist(0, STANDARD_DEVIATION), 1 << 16
    values = [normal.inv_cdf((part + 0.5) / parts) for part in range(parts)]
    return from_float32(np.array(values, np.float32), dtype)
