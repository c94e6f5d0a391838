"""take_columns: a range of each group of columns."""

import numpy as np
import pytest

from ingot.plan import Attr
from tests.plugins.ops.calls import evaluate, make_batch, random_array


@pytest.mark.parametrize(("first", "count"), [(0, 6), (2, 3), (5, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_columns(groups: int, first: int, count: int) -> None:
    x = random_array(4, 6 * groups)
    attrs: dict[str, Attr] = {"of": 6, "first": first, "count": count}
    (taken,) = evaluate("take_columns", [x], attrs, make_batch([1] * 4, [4], [0], [[0, 1]], []))
    expected = [x[:, 6 * group + first : 6 * group + first + count] for group in range(groups)]
    np.testing.assert_array_equal(taken, np.concatenate(expected, axis=1))
