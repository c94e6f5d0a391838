"""join_columns: rows side by side."""

import numpy as np
import pytest

from tests.plugins.ops.calls import evaluate, make_batch, random_array


@pytest.mark.parametrize("count", [2, 3])
def test_rows_side_by_side(count: int) -> None:
    parts = [random_array(4, 3 + i) for i in range(count)]
    inputs = [*parts, *[None] * (3 - count)]
    (y,) = evaluate("join_columns", inputs, {}, make_batch([1] * 4, [4], [0], [[0, 1]], []))
    np.testing.assert_array_equal(y, np.concatenate(parts, axis=1))
