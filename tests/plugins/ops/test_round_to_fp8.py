"""round_to_fp8: against torch's FP8, and in whole lines of codes."""

import numpy as np
import pytest
import torch

from ingot.dtypes import DType, from_float32, to_float32
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, make_batch, random_array


@pytest.mark.parametrize(("group", "groups"), [(0, 1), (128, 3)])
def test_against_torch(group: int, groups: int) -> None:
    """Columns behind the last ones hold zeros."""
    x = random_array(3, 300) * np.float32(5)
    codes, scales = evaluate("round_to_fp8", [x], {"group": group}, make_batch([0] * 3, [3], [0], [[0]]))
    assert (codes.shape, scales.shape) == ((3, 384), (3, groups))
    assert not codes[:, 300:].any()
    size = group or 300
    for row in range(3):
        for number in range(groups):
            columns = np.s_[row, number * size : min(300, (number + 1) * size)]
            top = np.abs(x[columns]).max()
            assert scales[row, number] == top / np.float32(448)
            wanted = torch.from_numpy(x[columns] * (np.float32(448) / top)).to(torch.float8_e4m3fn).float()
            np.testing.assert_array_equal(codes[columns], wanted.numpy())
    np.testing.assert_array_equal(to_float32(from_float32(codes, DType.F8), DType.F8), codes)


def test_what_is_not_finite_spoils_its_scale() -> None:
    x = random_array(2, 256)
    x[0, 200], x[1] = np.inf, 0
    codes, scales = evaluate("round_to_fp8", [x], {"group": 128}, make_batch([0] * 2, [2], [0], [[0]]))
    assert np.isnan(scales).tolist() == [[False, True], [False, False]]
    assert codes[0, :128].any()
    assert not codes[0, 128:].any()
    assert not codes[1].any()
    assert not scales[1].any()


@pytest.mark.parametrize(("group", "groups"), [(0, 1), (128, 3)])
def test_no_rows(group: int, groups: int) -> None:
    """As of logits, of which a chunk in the middle of a prompt has none."""
    codes, scales = evaluate("round_to_fp8", [random_array(0, 300)], {"group": group})
    assert (codes.shape, scales.shape) == ((0, 384), (0, groups))


def test_columns() -> None:
    out_cols = find_op("round_to_fp8").out_cols
    assert [out_cols([128], {"group": each}) for each in (0, 128)] == [(128, 1), (128, 1)]
    assert [out_cols([129], {"group": each}) for each in (0, 128)] == [(256, 1), (256, 2)]
