"""send: rows that go to the next pipeline stage."""

import numpy as np
import pytest

from ingot.plan import Attr
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, make_batch, random_array

PLACE: dict[str, Attr] = {"stage": 0, "stages": 2, "message": 0}


def test_the_next_stage_gets_the_same_numbers() -> None:
    op, x = find_op("send"), random_array(3, 5)
    assert op.transfer is not None
    got = op.transfer([x])
    np.testing.assert_array_equal(got, x)
    assert not np.shares_memory(got, x), "the stage writes over what it has sent"
    assert op.out_cols([5], PLACE) == ()


def test_no_stage_computes_it_by_itself() -> None:
    with pytest.raises(AssertionError, match="together"):
        evaluate("send", [random_array(2, 4)], PLACE, make_batch([1, 1], [2], [0], [[0]], []))


@pytest.mark.parametrize("changed", [{"stage": -1}, {"stages": 1}, {"message": -1}])
def test_refused_places(changed: dict[str, int]) -> None:
    assert "cannot be" in str(find_op("send").problem(["x"], {**PLACE, **changed}))
