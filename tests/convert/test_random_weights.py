"""Weights that are drawn: of one seed, name and shape always the same, of others others."""

import numpy as np

from ingot.convert.random_weights import STANDARD_DEVIATION, random_blocks
from ingot.dtypes import DType, to_float32


def drawn(
    name: str = "layers.0/q/weight", *, seed: int = 1, block: int = 1 << 20, dtype: DType = DType.F32
) -> np.ndarray:
    blocks = list(random_blocks(name, (100, 30), dtype, seed, block))
    assert all(each.size <= block for each in blocks)
    return to_float32(np.concatenate(blocks), dtype)


def test_seed_and_name_decide() -> None:
    first = drawn()
    assert first.shape == (3000,)
    np.testing.assert_array_equal(drawn(block=128), first)
    for other in (drawn(seed=2), drawn("layers.1/q/weight"), drawn("layers.0/k/weight")):
        assert (other != first).mean() > 0.9
    assert abs(first.std() / STANDARD_DEVIATION - 1) < 0.1
    assert abs(first.mean()) < 0.1 * STANDARD_DEVIATION


def test_factors_of_norms_are_ones() -> None:
    for dtype in (DType.F32, DType.BF16):
        assert (drawn("layers.0/norm/weight", dtype=dtype) == 1).all()
