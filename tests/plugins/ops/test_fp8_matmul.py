"""fp8_matmul: what matmul computes that rounds its input to FP8 itself; and in float64 from codes and scales."""

import numpy as np
import pytest

from ingot.plan import Attr, Step
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, make_batch, random_array, random_f8

BATCH = make_batch([0] * 3, [3], [0], [[0]])


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("gated", [0, 1])
def test_it_is_matmul_of_rounded_inputs(group: int, gated: int) -> None:
    """To the bit, epilogue included."""
    x, weight = random_array(3, 300), random_f8((10, 300), group)
    bias, residual = random_array(10, seed=1), random_array(3, 5 if gated else 10, seed=2)
    attrs: dict[str, Attr] = {"activation": "silu", "gated": gated, "activations": "fp8", "group": group}
    codes, scales = evaluate("round_to_fp8", [x], {"group": group}, BATCH)
    (found,) = evaluate("fp8_matmul", [codes, scales, weight, bias, residual], attrs, BATCH)
    (wanted,) = evaluate("matmul", [x, weight, bias, residual], attrs, BATCH)
    np.testing.assert_array_equal(found, wanted)


def test_scales_are_taken_as_given() -> None:
    weight = random_f8((6, 256), 128)
    codes, scales = np.zeros((2, 256), np.float32), np.array([[2, 3], [5, 7]], np.float32)
    codes[:, 0], codes[:, 200] = 1.5, -4
    attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "fp8", "group": 128}
    (found,) = evaluate("fp8_matmul", [codes, scales, weight, None, None], attrs, BATCH)
    values = weight.values.astype(np.float64)
    wanted = scales[:, :1] * 1.5 * values[:, 0] - scales[:, 1:] * 4 * values[:, 200]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_sizes_and_the_plain_matmul() -> None:
    op = find_op("fp8_matmul")
    attrs: dict[str, Attr] = {"gated": 0, "group": 128}
    assert op.size_problem([(384,), (3,), (10, 300), None, (10,)], attrs) is None
    for codes, scales in ((300, 3), (384, 1), (384, 4)):
        problem = op.size_problem([(codes,), (scales,), (10, 300), None, None], attrs)
        assert problem == f"codes ({codes},) and scales ({scales},) are not those of an input of 300 columns"
    assert op.size_problem([(384,), (3,), (10, 300), (9,), None], attrs) == "bias has shape (9,) instead of (10,)"
    step = Step(
        name="s", op="fp8_matmul", kernel="k", inputs=("codes", "scales", "w", "", "r"), outputs=("y",), attrs=attrs
    )
    assert (op.plain(step).op, op.plain(step).inputs) == ("matmul", ("codes", "w", "", "r"))
