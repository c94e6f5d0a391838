"""fp8_moe_down: what moe_down computes that rounds the inputs of each slot to FP8 itself."""

import numpy as np
import pytest

from ingot.plan import Attr, Step
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, random_array, random_f8
from tests.plugins.ops.test_fp8_moe_gate_up import IDS


@pytest.mark.parametrize("group", [0, 128])
def test_it_is_moe_down_of_rounded_inputs(group: int) -> None:
    """To the bit."""
    x, shares, weight = random_array(4, 2 * 300), random_array(4, 2, seed=1), random_f8((6, 10, 300), group)
    bias, attrs = random_array(60, seed=2), dict[str, Attr](activations="fp8", group=group)
    codes, scales = evaluate("round_slots_to_fp8", [x], {"group": group, "slots": 2})
    (found,) = evaluate("fp8_moe_down", [codes, IDS, shares, weight, bias, None, scales], attrs)
    (wanted,) = evaluate("moe_down", [x, IDS, shares, weight, bias, None], attrs)
    np.testing.assert_array_equal(found, wanted)


def test_no_rows() -> None:
    ids, attrs = random_array(0, 2), dict[str, Attr](activations="fp8", group=0)
    codes, scales, weight = random_array(0, 768), random_array(0, 2), random_f8((6, 10, 300))
    (y,) = evaluate("fp8_moe_down", [codes, ids, ids, weight, None, None, scales], attrs)
    assert y.shape == (0, 10)


def test_sizes_and_the_plain_op() -> None:
    op, attrs = find_op("fp8_moe_down"), dict[str, Attr](activations="fp8", group=128)
    weight = 6, 10, 300
    assert op.size_problem([(768,), (2,), (2,), weight, (60,), None, (6,)], attrs) is None
    for codes, scales in ((600, 6), (768, 2), (384, 3)):
        problem = op.size_problem([(codes,), (2,), (2,), weight, None, None, (scales,)], attrs)
        assert problem == f"codes ({codes},) and scales ({scales},) are not those of 2 slots of 300 columns"
    problem = op.size_problem([(768,), (2,), (3,), weight, None, None, (6,)], attrs)
    assert problem == "weights has shape (3,) instead of (2,)"
    assert op.size_problem([(768,), (2,), (2,), (10, 300), None, None, (6,)], attrs) == "the weight has shape (10, 300)"
    names = ("codes", "ids", "shares", "w", "", "lists", "scales")
    step = Step(name="s", op=op.name, kernel="k", inputs=names, outputs=("y",), attrs={})
    assert (op.plain(step).op, op.plain(step).inputs) == ("moe_down", names[:-1])
