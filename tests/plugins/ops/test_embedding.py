"""embedding: rows of the token table, plus rows of the position table at the tokens' positions."""

import numpy as np

from tests.plugins.ops.calls import evaluate, make_batch, random_array, random_rows


def test_rows_and_positions() -> None:
    table, positions = random_array(7, 4), random_array(9, 4, seed=1)
    batch = make_batch([6, 0, 6], [2, 1], [3, 0], [[0, 1], [2, -1]])  # at positions 3, 4 and 0
    np.testing.assert_array_equal(evaluate("embedding", [table, None], {"scale": 1.0}, batch)[0], table[[6, 0, 6]])
    expected = table[[6, 0, 6]] * np.float32(1.5) + positions[[3, 4, 0]]
    np.testing.assert_array_equal(evaluate("embedding", [table, positions], {"scale": 1.5}, batch)[0], expected)


def test_w8_tables() -> None:
    table, positions = random_rows(7, 6), random_rows(9, 6)
    batch = make_batch([5, 0], [2], [3], [[0, 1]])
    (out,) = evaluate("embedding", [table, positions], {"scale": 2.0}, batch)
    expected = table.values[[5, 0]] * np.float32(2) + positions.values[[3, 4]]
    np.testing.assert_array_equal(out, expected)
