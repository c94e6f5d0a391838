"""rope_table: cosines and sines of position times frequency."""

import numpy as np

from tests.plugins.ops.calls import evaluate, make_batch


def test_angles() -> None:
    inv_freq = np.array([1.0, 0.1, 0.001], np.float32)
    batch = make_batch([0, 0, 0], [1, 2], [5, 100], [[0, 1], [2, 3]])
    (table,) = evaluate("rope_table", [inv_freq], {"scale": 1.5}, batch)
    angle = np.array([5.0, 100.0, 101.0])[:, None] * inv_freq.astype(np.float64)
    np.testing.assert_allclose(table, 1.5 * np.hstack([np.cos(angle), np.sin(angle)]), atol=1e-5)
