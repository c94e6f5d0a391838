"""gather_columns: each row's columns in a given order."""

import numpy as np

from tests.plugins.ops.calls import evaluate, make_batch, random_array


def test_columns() -> None:
    x, order = random_array(4, 6), [5, 0, 0, 3]
    batch = make_batch([1] * 4, [4], [0], [[0, 1]], [])
    (gathered,) = evaluate("gather_columns", [x, np.array(order, np.float32)], {}, batch)
    np.testing.assert_array_equal(gathered, x[:, order])


def test_numbers_of_no_column() -> None:
    x = random_array(4, 6)
    order = np.array([-1, 6, np.nan, np.inf], np.float32)
    (gathered,) = evaluate("gather_columns", [x, order], {}, make_batch([1] * 4, [4], [0], [[0, 1]], []))
    np.testing.assert_array_equal(gathered, x[:, [0, 5, 0, 5]])
