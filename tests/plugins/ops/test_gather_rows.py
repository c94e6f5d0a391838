"""gather_rows: the rows whose logits are wanted, also none."""

import numpy as np
import pytest

from tests.plugins.ops.calls import evaluate, make_batch, random_array


@pytest.mark.parametrize("rows", [[], [2], [0, 1, 3]])
def test_rows(rows: list[int]) -> None:
    x = random_array(4, 5)
    batch = make_batch([1, 1, 1, 1], [4], [0], [[0, 1]], rows)
    (kept,) = evaluate("gather_rows", [x], {}, batch)
    assert kept.shape == (len(rows), 5)
    np.testing.assert_array_equal(kept, x[np.array(rows, int)])
