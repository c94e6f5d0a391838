"""round_slots_to_fp8: round_to_fp8 of each slot by itself."""

import numpy as np
import pytest

from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("group", [0, 128])
def test_each_slot_is_rounded_as_a_row(group: int) -> None:
    x = random_array(4, 3 * 150)
    x[1, 150:300], x[2, 10] = 0, np.inf
    codes, scales = evaluate("round_slots_to_fp8", [x], {"group": group, "slots": 3})
    wanted = evaluate("round_to_fp8", [x.reshape(12, 150)], {"group": group})
    assert (codes.shape, scales.shape) == ((4, 3 * 256), (4, 3 * (2 if group else 1)))
    np.testing.assert_array_equal(codes.reshape(12, -1), wanted[0])
    np.testing.assert_array_equal(scales.reshape(12, -1), wanted[1])


def test_one_slot_is_a_row() -> None:
    x = random_array(2, 150)
    for found, wanted in zip(
        evaluate("round_slots_to_fp8", [x], {"group": 128, "slots": 1}),
        evaluate("round_to_fp8", [x], {"group": 128}),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)


def test_no_rows() -> None:
    codes, scales = evaluate("round_slots_to_fp8", [random_array(0, 300)], {"group": 0, "slots": 2})
    assert (codes.shape, scales.shape) == ((0, 512), (0, 2))


def test_columns() -> None:
    op = find_op("round_slots_to_fp8")
    assert [op.out_cols([258], {"group": each, "slots": 2}) for each in (0, 128)] == [(512, 2), (512, 4)]
    assert op.problem(["x"], {"group": 0, "slots": 0}) == "attribute slots cannot be 0"
