"""The interpreter of plans: values go from step to step, may be replaced in between, and weights are asked for."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from ingot.dtypes import DType, from_float32, round_to_bf16, to_float32
from ingot.plan import Attr, Buffer, Rows, Step
from ingot.plugins.interpreter import Interpreter
from ingot.plugins.op import Array, KvCache, Operand
from ingot.plugins.quantised import stacked
from ingot.plugins.ref.session import Arena
from ingot.plugins.weight_rows import WeightRows
from ingot.plugins.weight_values import HeldWeight, Inputs, product
from tests.plugins.ops.calls import LAYOUT, ONE_TOKEN, make_batch, random_array, random_f8, random_grouped, random_rows


def step(op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Attr) -> Step:
    return Step(
        name=f"{op} {inputs[0]}",
        op=op,
        kernel=f"{op}.f32.ref",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        attrs=attrs,
    )


def interpreter(**weights: Operand) -> Interpreter:
    return Interpreter(weights=lambda _, name: weights[name], batch=ONE_TOKEN, kv=[KvCache(LAYOUT, 1)])


STEPS = (step("add", ["a", "b"], ["c"]), step("add", ["c", "b"], ["d"]), step("add", ["d", "w"], ["a"]))


def test_every_step_reads_what_the_ones_before_it_wrote() -> None:
    a, b, w = (random_array(1, 4, seed=seed) for seed in range(3))
    buffers = {"a": a, "b": b}
    names = [each.name for each in interpreter(w=w).run(STEPS, buffers)]
    assert names == ["add a", "add c", "add d"]
    np.testing.assert_array_equal(buffers["d"], a + b + b)
    np.testing.assert_array_equal(buffers["a"], a + b + b + w)


def test_a_value_that_is_replaced_after_its_step_is_what_later_steps_read() -> None:
    b, other = random_array(1, 4), random_array(1, 4, seed=7)
    buffers = {"a": b, "b": b}
    for done in interpreter(w=b).run(STEPS, buffers):
        if done.name == "add a":
            buffers["c"] = other
    np.testing.assert_array_equal(buffers["d"], other + b)


def test_one_step_by_itself_changes_no_buffer() -> None:
    a, b = random_array(1, 4), random_array(1, 4, seed=1)
    buffers = {"a": a, "b": b}
    assert list(interpreter().compute(STEPS[0], buffers)) == ["c"]
    assert list(buffers) == ["a", "b"]


def test_an_arena_keeps_a_result_that_is_a_view_of_what_another_one_overwrites() -> None:
    """A norm without a residual: its sum is x itself, and y lies where x lay."""
    places = {name: Buffer(name=name, rows=Rows.TOKENS, cols=8, offset=64 * at) for at, name in enumerate(("x", "s"))}
    x, weight = random_array(2, 8) * 3, random_array(8, seed=1)
    batch = make_batch([0, 1], [2], [0], [[0]])
    arena = Arena(np.full(192, 0xFF, np.uint8), places, batch)
    arena.update({"x": x})
    assert "y" not in arena
    norm = step("rms_norm", ["x", "w", ""], ["x", "s"], eps=1e-6)
    (done,) = interpreter(w=weight).run([norm], arena)
    assert done is norm
    np.testing.assert_array_equal(arena["s"], x)
    assert not np.array_equal(arena["x"], x)


def test_an_arena_rounds_to_the_types_of_its_buffers() -> None:
    """And holds NaN of each type where nothing was written."""
    types = (DType.F32, DType.BF16, DType.F16)
    places = {
        dtype.value: Buffer(name=dtype.value, rows=Rows.TOKENS, cols=8, dtype=dtype, offset=64 * at)
        for at, dtype in enumerate(types)
    }
    arena = Arena(np.full(192, 0xFF, np.uint8), places, make_batch([0, 1], [2], [0], [[0]]))
    x = random_array(2, 8)
    for dtype in types:
        assert np.isnan(arena[dtype.value]).all()
        arena.update({dtype.value: x})
        np.testing.assert_array_equal(arena[dtype.value], to_float32(from_float32(x, dtype), dtype))
        assert np.array_equal(arena[dtype.value], x) == (dtype is DType.F32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A weight that notes what is wanted of it."""

    held: HeldWeight
    asked: list[object]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def values(self) -> Array:
        self.asked.append("all")
        return self.held.values

    def rows(self, numbers: npt.NDArray[np.integer]) -> Array:
        self.asked.append(numbers.tolist())
        return self.held.rows(numbers)

    def products(self, parts: Sequence[tuple[int, Inputs]], activations: str) -> Iterator[Array]:
        self.asked.append([(expert, len(x)) for expert, x in parts])
        return self.held.products(parts, activations)


IDS = np.array([[0, 3], [1, 3], [0, 1]], np.float32)


@pytest.mark.parametrize(
    ("op", "inputs", "weight", "attrs", "wanted"),
    [
        ("matmul", ["x", "w", "", ""], random_array(5, 6), {"activation": "silu", "gated": 0}, [[(0, 3)]]),
        (
            "moe_gate_up",
            ["x", "ids", "w", ""],
            random_array(4, 8, 6),
            {"activation": "silu", "limit": 0.0, "alpha": 1.0, "gated": 1},
            [[(0, 2), (1, 2), (3, 2)]],
        ),
        ("moe_down", ["x", "ids", "shares", "w", ""], random_array(4, 5, 3), {}, [[(0, 2), (1, 2), (3, 2)]]),
        ("embedding", ["w", "", "input_ids", ""], random_array(7, 6), {"scale": 2.0}, [[4, 0, 4]]),
        ("rms_norm", ["x", "w", ""], random_array(6), {"eps": 1e-6}, ["all"]),
    ],
)
def test_a_step_asks_its_weight_for_no_more_than_it_needs(
    op: str, inputs: list[str], weight: Array, attrs: dict[str, Attr], wanted: list[object]
) -> None:
    values = {"x": random_array(3, 6, seed=3), "ids": IDS, "shares": random_array(3, 2, seed=4)}
    asked = Asked(held=HeldWeight(held=weight), asked=[])
    made = step(op, inputs, ["y"], activations="f32", group=0, **attrs)
    batch = make_batch([4, 0, 4], [3], [0], [[0]])
    by_name: dict[str, Operand] = {"w": weight, "asked": asked}
    runner = Interpreter(weights=lambda _, name: by_name[name], batch=batch, kv=[KvCache(LAYOUT, 1)])
    lazy = dataclasses.replace(made, inputs=tuple("asked" if name == "w" else name for name in inputs))
    np.testing.assert_array_equal(runner.compute(lazy, values)["y"], runner.compute(made, values)["y"])
    assert asked.asked == wanted


def test_a_held_weight_of_experts_multiplies_with_the_matrix_of_each() -> None:
    quantised, x = (
        [random_rows(4, 6), dataclasses.replace(random_rows(4, 6), scale=np.ones(4, np.float32))],
        random_array(2, 6),
    )
    floats = [each.values for each in quantised]
    for matrices, held in ((quantised, stacked(quantised)), (floats, np.stack(floats))):
        first, last = HeldWeight(held=held).products([(0, x), (1, x[:1])], "f32")
        np.testing.assert_array_equal(first, product(x, matrices[0], "f32"))
        np.testing.assert_array_equal(last, product(x[:1], matrices[1], "f32"))


@pytest.mark.parametrize("rows", [random_grouped((4, 40), 16, "zero"), random_f8((4, 40), 32)], ids=["w4ts", "f8"])
def test_matrix_units_take_both_factors_in_bf16(rows: WeightRows) -> None:
    """Of groups, the numbers that the row's scale multiplies are rounded too; float32 and bf16_inputs keep them."""
    x = random_array(3, 40)
    wide = x.astype(np.float64) @ rows.values.astype(np.float64).T
    np.testing.assert_allclose(product(x, rows, "f32"), wide, rtol=1e-6, atol=1e-6 * np.ptp(wide))
    narrow = dataclasses.replace(rows, scale=np.ones_like(rows.scale)).values
    assert np.abs(round_to_bf16(narrow) - narrow).max() > 0
    expected = round_to_bf16(x).astype(np.float64) @ round_to_bf16(narrow).astype(np.float64).T
    np.testing.assert_array_equal(product(x, rows, "bf16"), expected.astype(np.float32) * rows.scale)
    expected = round_to_bf16(x).astype(np.float64) @ narrow.astype(np.float64).T
    np.testing.assert_array_equal(product(x, rows, "bf16_inputs"), expected.astype(np.float32) * rows.scale)
