"""What matmuls take in 16 bits and find in float32 is rounded by a kernel call of its own, once."""

import dataclasses

import pytest

from ingot.builder.passes.cast_inputs import CastInputs
from ingot.builder.pipeline import input_passes
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.registry import find_target
from tests.passes.test_store_narrow import add, norm, product, program, stored

CAST = CastInputs(kernel="cast.f32.sm80")


def heads(x: int, y: int, kept: int) -> Draft:
    """A matmul of each head."""
    attrs: dict[str, Attr] = {"activations": "bf16", "heads": 1, "kept": kept}
    return Draft(name=f"heads{y}", op="head_matmul", kernel="", inputs=(x, "w", None), outputs=(y,), attrs=attrs)


def wiring(made: Program) -> list[tuple[str, tuple[str | int | None, ...], tuple[int | None, ...]]]:
    """(name, inputs, outputs) of every step."""
    return [(step.name, step.inputs, step.outputs) for step in made.steps]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_matmuls_of_one_value_share_what_is_rounded(dtype: str) -> None:
    given = program(norm(0, 1), product(1, 2, dtype), add(1, 2, 3), product(1, 4, dtype, residual=1))
    made, report = CAST(given)
    assert wiring(made) == [
        ("norm1", (0, "w", None), (1, None)),
        ("product2.cast", (1,), (5,)),
        ("product2", (5, "w", None, None), (2,)),
        ("add3", (1, 2), (3,)),
        ("product4", (5, "w", None, 1), (4,)),
    ]
    assert stored(made) == f"f32 f32 f32 f32 f32 {dtype}"
    cast = made.steps[1]
    assert (cast.op, cast.kernel, cast.attrs) == ("cast", "cast.f32.sm80", {"to": dtype})
    assert (report.name, report.fired, report.refused) == ("cast_inputs", 1, {"an earlier matmul reads it too": 1})


def test_what_is_16_bits_already_or_is_not_rounded_to_them_stays() -> None:
    given = program(norm(0, 1), product(1, 2), product(2, 3, "f32"), product(2, 4, "int8"), product(2, 5, "fp8"))
    values = tuple(
        dataclasses.replace(each, dtype=DType.BF16) if i == 1 else each for i, each in enumerate(given.values)
    )
    given = dataclasses.replace(given, values=values)
    made, report = CAST(given)
    assert made == given
    assert (report.fired, report.refused) == (0, {})


def test_columns_that_a_matmul_copies_are_not_rounded() -> None:
    made, _ = CAST(program(norm(0, 1), heads(1, 2, kept=8), heads(1, 3, kept=0)))
    assert [step.inputs for step in made.steps[1:]] == [(1,), (4, "w", 1), (4, "w", None)]


def test_each_type_is_rounded_to() -> None:
    made, report = CAST(program(norm(0, 1), product(1, 2), product(1, 3, "f16")))
    assert [step.name for step in made.steps] == ["norm1", "product2.cast", "product2", "product3.cast", "product3"]
    assert (stored(made), report.fired) == ("f32 f32 f32 f32 bf16 f16", 2)


def test_it_runs_for_targets_whose_matmuls_take_16_bits() -> None:
    for name in ("cuda/sm90", "cuda/sm80"):
        assert CAST in input_passes(find_target(name), lambda weight: ())
    for name in ("ref", "cpu/amx", "tensorrt-rtx/sm89"):
        assert input_passes(find_target(name), lambda weight: ()) == ()
