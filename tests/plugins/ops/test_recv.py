"""recv: rows of the pipeline stage before."""

import pytest

from ingot.plan import Attr, Rows
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, make_batch

PLACE: dict[str, Attr] = {"stage": 1, "stages": 2, "message": 0, "columns": 7}


def test_what_it_gives() -> None:
    op = find_op("recv")
    assert (op.inputs, op.rows, op.out_cols([], PLACE)) == ((), Rows.TOKENS, (7,))
    assert op.transfer is find_op("send").transfer
    assert op.problem([], PLACE) is None


def test_no_stage_computes_it_by_itself() -> None:
    with pytest.raises(AssertionError, match="together"):
        evaluate("recv", [], PLACE, make_batch([1, 1], [2], [0], [[0]], []))


@pytest.mark.parametrize("changed", [{"stage": 0}, {"stages": 1}, {"columns": 0}])
def test_refused_places(changed: dict[str, int]) -> None:
    assert "cannot be" in str(find_op("recv").problem([], {**PLACE, **changed}))
