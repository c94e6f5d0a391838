"""all_gather: the columns of all ranks side by side."""

import numpy as np

from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import random_array


def test_columns_side_by_side() -> None:
    op = find_op("all_gather")
    values = [random_array(3, cols) for cols in (4, 1, 2)]
    assert op.collective is not None
    np.testing.assert_array_equal(op.collective(values), np.concatenate(values, axis=1))
    attrs = {"ranks": 3, "columns": 7}
    assert op.out_cols([4], attrs) == (7,)
    assert op.size_problem([(4,)], attrs) is None
    assert "8 columns of a rank are more than the 7" in str(op.size_problem([(8,)], attrs))
