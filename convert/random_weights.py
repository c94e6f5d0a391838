"""Weights drawn from a seed: a model of an exact shape without its files, for sizing and benchmarks."""

import math
import zlib
from collections.abc import Iterator

import numpy as np

from ingot.convert.weights import Bits, Shape
from ingot.dtypes import DType, from_float32

STANDARD_DEVIATION = 0.02


def random_blocks(name: str, shape: Shape, dtype: DType, seed: int, block: int) -> Iterator[Bits]:
    """Stored bits of weight `name`, flat: ones for the factors of norms, normally distributed for all others.

    The values depend on seed, name and shape alone, not on the order in which weights are drawn.
    """
    is_factor = name.endswith("norm/weight")
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    size = math.prod(shape)
    for begin in range(0, size, block):
        count = min(block, size - begin)
        if is_factor:
            values = np.ones(count, dtype=np.float32)
        else:
            values = generator.standard_normal(count, dtype=np.float32) * np.float32(STANDARD_DEVIATION)
        yield from_float32(values, dtype)
