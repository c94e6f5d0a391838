"""fp8_moe_gate_up: what moe_gate_up computes that rounds its input to FP8 itself."""

import numpy as np
import pytest

from ingot.plan import Attr, Step
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, random_array, random_f8

ATTRS: dict[str, Attr] = {"activation": "silu", "gated": 1, "limit": 0.0, "alpha": 1.0, "activations": "fp8"}
IDS = np.array([[0, 4], [1, 2], [0, 5], [2, 3]], np.float32)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("changed", [{}, {"limit": 7.0, "alpha": 1.702}, {"gated": 0, "activation": "relu2"}])
def test_it_is_moe_gate_up_of_rounded_inputs(group: int, changed: dict[str, Attr]) -> None:
    """To the bit."""
    x, weight, bias = random_array(4, 300), random_f8((6, 10, 300), group), random_array(60, seed=1)
    attrs = {**ATTRS, **changed, "group": group}
    codes, scales = evaluate("round_to_fp8", [x], {"group": group})
    (found,) = evaluate("fp8_moe_gate_up", [codes, IDS, weight, bias, None, scales], attrs)
    (wanted,) = evaluate("moe_gate_up", [x, IDS, weight, bias, None], attrs)
    np.testing.assert_array_equal(found, wanted)


def test_sizes_and_the_plain_op() -> None:
    op, attrs = find_op("fp8_moe_gate_up"), {**ATTRS, "group": 128}
    assert op.size_problem([(384,), (2,), (6, 10, 300), (60,), None, (3,)], attrs) is None
    for codes, scales in ((300, 3), (384, 1), (384, 4)):
        problem = op.size_problem([(codes,), (2,), (6, 10, 300), None, None, (scales,)], attrs)
        assert problem == f"codes ({codes},) and scales ({scales},) are not those of an input of 300 columns"
    problem = op.size_problem([(384,), (2,), (6, 10, 300), (10,), None, (3,)], attrs)
    assert problem == "bias has shape (10,) instead of (60,)"
    assert op.size_problem([(384,), (2,), (10, 300), None, None, (3,)], attrs) == "the weight has shape (10, 300)"
    step = Step(
        name="s", op=op.name, kernel="k", inputs=("codes", "ids", "w", "", "lists", "scales"), outputs=("y",), attrs={}
    )
    assert (op.plain(step).op, op.plain(step).inputs) == ("moe_gate_up", ("codes", "ids", "w", "", "lists"))


def test_other_roundings_are_no_use_of_it() -> None:
    op, given = find_op("fp8_moe_gate_up"), ["x"] * 6
    assert op.problem(given, {**ATTRS, "group": 0}) is None
    assert op.problem(given, {**ATTRS, "group": 32}) == "attribute group cannot be 32"
    problem = op.problem(given, {**ATTRS, "group": 0, "activations": "bf16"})
    assert problem == "attribute activations cannot be 'bf16'"
