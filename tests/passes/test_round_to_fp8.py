"""What matmuls take in FP8 is rounded by a kernel call of its own, once for all that read it with the same scales."""

import dataclasses

from ingot.builder.passes.cast_inputs import CastInputs
from ingot.builder.passes.round_to_fp8 import RoundToFp8
from ingot.builder.passes.sort_by_expert import SortByExpert
from ingot.builder.pipeline import fp8_passes, input_passes
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.registry import find_op, find_target
from tests.passes.test_cast_inputs import wiring
from tests.passes.test_store_narrow import add, norm, product, program, stored

ROUND = RoundToFp8(
    kernels={
        **{op: f"{op}.f32.sm90a" for op in ("round_to_fp8", "round_slots_to_fp8")},
        **{op: f"{op}.f8f8.sm90a" for op in ("fp8_matmul", "fp8_moe_gate_up", "fp8_moe_down")},
    }
)


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
    assert (rounding.op, rounding.kernel, rounding.attrs) == ("round_to_fp8", "round_to_fp8.f32.sm90a", {"group": 128})
    assert (multiplying.op, multiplying.kernel) == ("fp8_matmul", "fp8_matmul.f8f8.sm90a")
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


def experts(x: int, ids: int, y: int, *, group: int = 128, down: bool = False) -> Draft:
    """One half of the experts, which rounds its input to FP8."""
    inputs = (x, ids, ids, "down", None, None) if down else (x, ids, "gate_up", None, None)
    op = "moe_down" if down else "moe_gate_up"
    attrs: dict[str, Attr] = {"activations": "fp8", "group": group}
    return Draft(name=f"{op}{y}", op=op, kernel="", inputs=inputs, outputs=(y,), attrs=attrs)


def test_experts_read_codes_too() -> None:
    """Those of a matmul of the same input; of what moe_down reads, three slots of 200 columns are rounded apart."""
    given = wide(program(norm(0, 1), fp8(1, 2, 128), experts(1, 3, 4), experts(4, 3, 5, down=True)), 600)
    ids = dataclasses.replace(given.values[3], cols=3)
    made, report = ROUND(dataclasses.replace(given, values=(*given.values[:3], ids, *given.values[4:])))
    assert wiring(made)[1:] == [
        ("product2.round_to_fp8", (1,), (6, 7)),
        ("product2", (6, 7, "w", None, None), (2,)),
        ("moe_gate_up4", (6, 3, "gate_up", None, None, 7), (4,)),
        ("moe_down5.round_slots_to_fp8", (4,), (8, 9)),
        ("moe_down5", (8, 3, 3, "down", None, None, 9), (5,)),
    ]
    assert stored(made) == "f32 f32 f32 f32 f32 f32 f8 f32 f8 f32"
    assert [each.cols for each in made.values[6:]] == [640, 5, 3 * 256, 3 * 2]
    assert [(each.op, each.kernel) for each in made.steps[3:]] == [
        ("fp8_moe_gate_up", "fp8_moe_gate_up.f8f8.sm90a"),
        ("round_slots_to_fp8", "round_slots_to_fp8.f32.sm90a"),
        ("fp8_moe_down", "fp8_moe_down.f8f8.sm90a"),
    ]
    assert made.steps[4].attrs == {"group": 128, "slots": 3}
    assert (report.fired, report.refused) == (2, {"an earlier matmul reads it too": 1})


def test_experts_that_take_16_bits_stay() -> None:
    halves = experts(1, 3, 4), experts(4, 3, 5, down=True)
    given = program(norm(0, 1), *(dataclasses.replace(each, attrs={"activations": "bf16"}) for each in halves))
    made, report = ROUND(given)
    assert made == given
    assert (report.fired, report.refused) == (0, {})


def test_rows_are_sorted_for_experts_that_read_codes() -> None:
    """The lists come where the other products have them."""
    made, _ = ROUND(program(norm(0, 1), experts(1, 3, 4), experts(4, 3, 5, down=True)))
    lists, report = SortByExpert(kernel="sort_by_expert.f32.sm80", experts=lambda weight: 8)(made)
    read = [step.inputs for step in lists.steps if step.op.startswith("fp8_moe")]
    assert read == [(6, 3, "gate_up", None, 10, 7), (8, 3, 3, "down", None, 10, 9)]
    assert report.fired == 1


def test_the_steps_are_uses_of_their_ops() -> None:
    made, _ = ROUND(wide(program(norm(0, 1), fp8(1, 2, 128)), 300))
    rounding, multiplying = made.steps[1:]
    assert find_op(rounding.op).problem(["x"], rounding.attrs) is None
    attrs = {"activation": "none", "gated": 0, **multiplying.attrs}
    assert find_op(multiplying.op).problem(["codes", "scales", "w", "", ""], attrs) is None


def test_it_runs_where_matmuls_take_fp8() -> None:
    assert ROUND in input_passes(find_target("cuda/sm90"), lambda weight: ())
    (by_warps,) = fp8_passes(find_target("cuda/sm89"))
    assert by_warps == RoundToFp8(kernels={op: kernel.replace("sm90a", "sm89") for op, kernel in ROUND.kernels.items()})
    for name in ("cuda/sm80", "cuda/sm86", "cpu/amx", "tensorrt-rtx/sm89"):
        assert fp8_passes(find_target(name)) == ()
