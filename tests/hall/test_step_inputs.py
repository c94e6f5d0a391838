"""The inputs of a step: what a batch gives by their names, and how ops and plans ask for them."""

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.plan import Extent
from ingot.plugins.registry import find_op, op_names
from ingot.step_inputs import STEP_INPUTS, inputs_among, step_arrays
from tests.plugins.ops.calls import make_batch


def test_what_a_batch_gives() -> None:
    batch = make_batch([5, 6, 7, 8], [1, 2, 1], [9, 0, 3], [[0, 1], [2, -1], [4, -1]], logit_rows=[0, 3])
    found = step_arrays(batch)
    assert found["input_ids"].tolist() == [5, 6, 7, 8]
    assert found["positions"].tolist() == [9, 0, 1, 3]
    assert found["token_sequences"].tolist() == [0, 1, 1, 2]
    assert found["query_starts"].tolist() == [0, 1, 3, 4]
    assert found["past_lengths"].tolist() == [9, 0, 3]
    assert found["block_tables"].shape == (1, 3, 2)
    assert found["logit_rows"].tolist() == [0, 3]


def test_every_input_has_its_type_and_length() -> None:
    batch = make_batch([5, 6, 7, 8], [1, 2, 1], [9, 0, 3], [[0, 1], [2, -1], [4, -1]], logit_rows=[0, 3])
    lengths = {Extent.TOKENS: 4, Extent.SEQUENCES: 3, Extent.BOUNDS: 4, Extent.BLOCKS: 1, Extent.LOGITS: 2}
    found = step_arrays(batch)
    assert list(found) == [each.name for each in STEP_INPUTS]
    for each in STEP_INPUTS:
        assert each.dtype is DType.I32
        assert found[each.name].dtype == np.int32
        assert len(found[each.name]) == lengths[each.extent], each.name


def test_ops_ask_for_inputs_that_there_are() -> None:
    roles = {find_op(name).inputs[index].rstrip("?") for name in op_names() for index in find_op(name).batch_inputs}
    assert roles == {each.name for each in STEP_INPUTS}
    assert [each.name for each in inputs_among({"positions", "w", "input_ids"})] == ["input_ids", "positions"]


@pytest.mark.parametrize(
    ("given", "inputs"), [(["w", ""], ("w", "", "input_ids", "")), (["w", "p"], ("w", "p", "input_ids", "positions"))]
)
def test_positions_are_read_where_there_is_a_table_of_them(given: list[str], inputs: tuple[str, ...]) -> None:
    op = find_op("embedding")
    assert op.with_batch(given) == inputs
    assert op.problem(inputs, {"scale": 1.0}) is None


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (("w", "", "positions", ""), "input input_ids must be input_ids, got 'positions'"),
        (("w", "", "input_ids", "positions"), "input positions must be absent, got 'positions'"),
        (("w", "p", "input_ids", ""), "input positions must be positions, got ''"),
        (("w", "", "", ""), "input input_ids is missing"),
    ],
)
def test_a_step_that_reads_something_else_is_no_use_of_the_op(inputs: tuple[str, ...], words: str) -> None:
    assert find_op("embedding").problem(inputs, {"scale": 1.0}) == words
