"""What only products read is stored as they round it; everything else stays float32."""

import dataclasses

import pytest

from ingot.builder.memory import Value
from ingot.builder.passes.store_narrow import StoreNarrow
from ingot.builder.pipeline import step_passes
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plan import Attr, Rows
from ingot.plugins.registry import find_target

NARROW = StoreNarrow(ops=frozenset({"rms_norm", "matmul"}))


def norm(x: int, y: int) -> Draft:
    return Draft(name=f"norm{y}", op="rms_norm", kernel="", inputs=(x, "w", None), outputs=(y, None), attrs={})


def product(x: int, y: int, activations: str = "bf16", residual: int | None = None) -> Draft:
    attrs: dict[str, Attr] = {"activations": activations}
    inputs = (x, "w", None, residual)
    return Draft(name=f"product{y}", op="matmul", kernel="", inputs=inputs, outputs=(y,), attrs=attrs)


def add(a: int, b: int, y: int) -> Draft:
    return Draft(name=f"add{y}", op="add", kernel="", inputs=(a, b), outputs=(y,), attrs={})


def program(*steps: Draft) -> Program:
    count = 1 + max(each for step in steps for each in step.outputs if each is not None)
    return Program(steps=steps, values=(Value(rows=Rows.TOKENS, cols=8),) * count, logits=count - 1)


def stored(made: Program) -> str:
    """The types of all values."""
    return " ".join(value.dtype.value for value in made.values)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_what_products_round_is_stored_so(dtype: str) -> None:
    made, report = NARROW(program(norm(0, 1), product(1, 2, dtype), product(1, 3, dtype), add(2, 3, 4)))
    assert stored(made) == f"f32 {dtype} f32 f32 f32"
    assert (report.fired, report.refused) == (1, {})


def test_a_product_that_rounds_nothing_or_to_int8_leaves_its_input() -> None:
    for activations in ("f32", "int8"):
        made, report = NARROW(program(norm(0, 1), product(1, 2, activations)))
        assert stored(made) == "f32 f32 f32"
        assert (report.fired, report.refused) == (0, {})


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((norm(0, 1), product(1, 2), add(1, 2, 3)), "others than products read it too"),
        ((norm(0, 1), product(1, 2), product(2, 3, residual=1)), "others than products read it too"),
        ((norm(0, 1), product(1, 2), product(1, 3, "f16")), "products round it to several types"),
        ((add(0, 0, 1), product(1, 2)), "add stores float32"),
        ((dataclasses.replace(norm(0, 1), outputs=(None, 1)), product(1, 2)), "rms_norm stores float32"),
    ],
)
def test_refusals(steps: tuple[Draft, ...], reason: str) -> None:
    made, report = NARROW(program(*steps))
    assert report.refused[reason] == 1
    assert made.values[1].dtype is DType.F32


def test_it_runs_for_targets_that_store_so() -> None:
    (only,) = step_passes(find_target("cuda/sm90"))
    assert isinstance(only, StoreNarrow)
    assert "rms_norm" in only.ops
    assert not any(
        isinstance(each, StoreNarrow) for name in ("ref", "cpu/amx") for each in step_passes(find_target(name))
    )


def test_columns_that_a_matmul_copies_stay_float32() -> None:
    attrs: dict[str, Attr] = {"activations": "bf16", "heads": 1, "kept": 8}
    copying = Draft(name="heads", op="head_matmul", kernel="", inputs=(1, "w", None), outputs=(2,), attrs=attrs)
    made, report = NARROW(program(norm(0, 1), copying))
    assert stored(made) == "f32 f32 f32"
    assert (report.fired, report.refused) == (0, {})
    made, _ = NARROW(program(norm(0, 1), dataclasses.replace(copying, attrs={**attrs, "kept": 0})))
    assert stored(made) == "f32 bf16 f32"
