"""What matmuls take in FP8 is rounded by a kernel call of its own, once for all that read it with the same scales."""

import dataclasses

from ingot.builder.passes.cast_inputs import CastInputs
from ingot.builder.passes.round_to_fp8 import RoundToFp8
from ingot.builder.pipeline import fp8_passes, input_passes
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plugins.registry import find_op, find_target
from tests.passes.test_cast_inputs import wiring
from tests.passes.test_store_narrow import add, norm, product, program, stored

ROUND = RoundToFp8(kernel="round_to_fp8.f32.sm90a", product="fp8_matmul.f8f8.sm90a")


def fp8(x: int, y: int, group: int = 0, residual: int | None = None) -> Draft:
    """A matmul that rounds its input to FP8."""
    made = product(x, y, "fp8", residual)
    return dataclasses.replace(made, attrs={**made.attrs, "group": group})


def wide(made: Program, cols: int) -> Program:
    """With values of so many columns."""
    return dataclasses.replace(made, values=tuple(dataclasses.replace(each, cols=cols) for each in made.values))


def test_matmuls_of_one_value_share_what_is_rounded() -> None:
    made, report = ROUND(wide(program(norm(0, 1), fp8(1, 2, 128), add(1, 2, 3), fp8(1, 4, 128, residual=1)), 300))
    assert wiring(made) == [
        ("norm1", (0, "w", None), (1, None)),
        ("product2.round_to_fp8", (1,), (5, 6)),
        ("product2", (5, 6, "w", None, None), (2,)),
        ("add3", (1, 2), (3,)),
        ("product4", (5, 6, "w", None, 1), (4,)),
    ]
    assert stored(made) == "f32 f32 f32 f32 f32 f8 f32"
    assert [each.cols for each in made.values[5:]] == [384, 3]
    rounding, multiplying = made.steps[1:3]
    assert (rounding.op, rounding.kernel, rounding.attrs) == ("round_to_fp8", ROUND.kernel, {"group": 128})
    assert (multiplying.op, multiplying.kernel) == ("fp8_matmul", ROUND.product)
    assert multiplying.attrs == {"activations": "fp8", "group": 128}
    assert (report.name, report.fired, report.refused) == ("round_to_fp8", 1, {"an earlier matmul reads it too": 1})


def test_other_scales_are_rounded_apart() -> None:
    """A scale for a row, and one for each 128 columns of it; another value has its own, too."""
    made, report = ROUND(wide(program(norm(0, 1), fp8(1, 2), fp8(1, 3, 128), fp8(2, 4)), 256))
    assert [step.inputs[:2] for step in made.steps if step.op == "fp8_matmul"] == [(5, 6), (7, 8), (9, 10)]
    assert [each.cols for each in made.values[5:]] == [256, 1, 256, 2, 256, 1]
    assert (report.fired, report.refused) == (3, {})


def test_other_matmuls_stay() -> None:
    given = program(norm(0, 1), product(1, 2), product(1, 3, "f16"), product(1, 4, "int8"), product(1, 5, "f32"))
    made, report = ROUND(given)
    assert made == given
    assert (report.fired, report.refused) == (0, {})


def test_inputs_in_16_bits_are_rounded_beside_it() -> None:
    """cast_inputs leaves matmuls that take FP8, before this pass and behind it."""
    given = program(norm(0, 1), fp8(1, 2), product(1, 3))
    cast = CastInputs(kernel="cast.f32.sm80")
    for first, second in ((cast, ROUND), (ROUND, cast)):
        made, _ = second(first(given)[0])
        inputs = {step.name: step.inputs[0] for step in made.steps}
        assert [step.name for step in made.steps if step.op in ("cast", "round_to_fp8")] == [
            "product2.round_to_fp8",
            "product3.cast",
        ]
        assert inputs["product2.round_to_fp8"] == inputs["product3.cast"] == 1
        assert made.values[int(inputs["product2"] or 0)].dtype is DType.F8
        assert made.values[int(inputs["product3"] or 0)].dtype is DType.BF16


def test_the_steps_are_uses_of_their_ops() -> None:
    made, _ = ROUND(wide(program(norm(0, 1), fp8(1, 2, 128)), 300))
    rounding, multiplying = made.steps[1:]
    assert find_op(rounding.op).problem(["x"], rounding.attrs) is None
    attrs = {"activation": "none", "gated": 0, **multiplying.attrs}
    assert find_op(multiplying.op).problem(["codes", "scales", "w", "", ""], attrs) is None


def test_it_runs_where_matmuls_take_fp8() -> None:
    assert ROUND in input_passes(find_target("cuda/sm90"), lambda weight: ())
    for name in ("cuda/sm80", "cuda/sm120", "cpu/amx", "tensorrt-rtx/sm89"):
        assert fp8_passes(find_target(name)) == ()
