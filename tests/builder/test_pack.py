"""Packed weights: layouts, slices, alignment, rounding, and the count of values that are not finite."""

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from ingot.builder import pack
from ingot.builder.expressions import WeightReader
from ingot.builder.pack import Packer, WeightUse, place_weights, slice_count
from ingot.builder.parallel_map import parallel_map
from ingot.builder.quantise import quantise
from ingot.dtypes import DType, bf16_to_float32, float32_to_bf16
from ingot.plan import Weight
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.ref.weights import read_weight
from tests.handmade import checked
from tests.passes.graphs import GraphMaker
from tests.spanning import pairs, spanning

RANDOM = np.random.default_rng(9)


def make_use(
    values: np.ndarray, dtype: DType, *, panels: bool = False, gated: bool = False, name: str = "w", group: int = 0
) -> WeightUse:
    g = GraphMaker()
    graph = g.finish(g.node("Add", g.input(), g.constant(values.astype(np.float32))))
    return WeightUse(
        name=name,
        tensor=graph.logits.inputs[0].inputs[1],
        dtype=dtype,
        shape=values.shape,
        panels=panels,
        gated=gated,
        group=group,
    )


def packed_section(uses: list[WeightUse], slices: int, threads: int = 1) -> tuple[list[Weight], np.ndarray, Packer]:
    weights, size = place_weights(uses, slices)
    section = np.zeros(size, np.uint8)
    done: list[int] = []
    with WeightReader(checked(Path("unused"))) as reader:
        packer = Packer(reader, uses, weights, threads)
        position = 0
        for offset, data in packer.blocks(done.append):
            assert offset >= position
            section[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
            position = offset + len(data)
    assert sum(done) == sum(weight.nbytes for weight in weights)
    assert position == size
    return weights, section, packer


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("shape", [(1, 1), (15, 33), (16, 32), (70, 17), (200, 5)])
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_products_survive(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, shape: tuple[int, int], slices: int, block: int
) -> None:
    monkeypatch.setattr(pack, "BLOCK_BYTES", block)
    values = RANDOM.normal(0, 1, shape).astype(np.float32)
    gated = RANDOM.normal(0, 1, (2 * shape[0], shape[1])).astype(np.float32)
    uses = [
        make_use(values, dtype, panels=True, name="plain"),
        make_use(gated, dtype, panels=True, gated=True, name="gated"),
        make_use(values, dtype, name="table"),
        make_use(values[0], DType.F32, name="vector"),
    ]
    weights, section, packer = packed_section(uses, slices)
    for weight, expected in zip(weights, (values, gated, values, values[0]), strict=True):
        rounded = bf16_to_float32(float32_to_bf16(expected)) if weight.dtype is DType.BF16 else expected
        np.testing.assert_array_equal(read_weight(section, weight), rounded)
    assert packer.nonfinite == {}


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("group", "shape", "cut"),
    spanning(itertools.product([0, 32], [(1, 1), (15, 33), (70, 172)], [(1, 1 << 20, 1), (3, 1, 3)]), *pairs(3)),
)
def test_quantised_weights_survive(
    monkeypatch: pytest.MonkeyPatch, group: int, shape: tuple[int, int], cut: tuple[int, int, int]
) -> None:
    """However the work is cut, each row is what the quantiser makes of it alone; a tied table is the head's twin."""
    slices, block, threads = cut
    monkeypatch.setattr(pack, "BLOCK_BYTES", block)
    values = RANDOM.normal(0, 1, shape).astype(np.float32)
    gated = RANDOM.normal(0, 1, (2 * shape[0], shape[1])).astype(np.float32)
    dtype = DType.W4 if group else DType.W8
    uses = [
        make_use(values, dtype, panels=True, name="plain", group=group),
        make_use(gated, dtype, panels=True, gated=True, name="gated", group=group),
        make_use(values, DType.W8, panels=True, name="head"),
        make_use(values, DType.W8, name="table"),
    ]
    weights, section, packer = packed_section(uses, slices, threads)
    assert packer.nonfinite == {}
    found = [read_weight(section, weight) for weight in weights]
    for use, rows, expected in zip(uses, found, (values, gated, values, values), strict=True):
        assert isinstance(rows, QuantisedRows)
        for number in range(len(expected)):
            alone = quantise(expected[number : number + 1], use.precision)
            assert rows.scale[number] == alone.scale[0]
            np.testing.assert_array_equal(rows.integers[number], alone.integers[0])


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_experts_survive(monkeypatch: pytest.MonkeyPatch, dtype: DType, slices: int, block: int) -> None:
    monkeypatch.setattr(pack, "BLOCK_BYTES", block)
    down, gate_up = RANDOM.normal(0, 1, (5, 70, 17)), RANDOM.normal(0, 1, (5, 2 * 41, 33))
    gate_up[3, 2, 1] = np.inf
    uses = [
        make_use(down, dtype, panels=True, name="down"),
        make_use(gate_up, dtype, panels=True, gated=True, name="gate_up"),
    ]
    weights, section, packer = packed_section(uses, slices)
    for weight, expected in zip(weights, (down, gate_up), strict=True):
        values = expected.astype(np.float32)
        rounded = bf16_to_float32(float32_to_bf16(values)) if dtype is DType.BF16 else values
        np.testing.assert_array_equal(read_weight(section, weight), rounded)
        assert len(weight.pieces) == slices
    assert packer.nonfinite == {"gate_up": 1}


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize(("slices", "block"), [(1, 1 << 20), (3, 1)])
def test_quantised_experts_survive(monkeypatch: pytest.MonkeyPatch, group: int, slices: int, block: int) -> None:
    monkeypatch.setattr(pack, "BLOCK_BYTES", block)
    dtype = DType.W4 if group else DType.W8
    for shape, gated in (((5, 70, 172), False), ((5, 2 * 41, 33), True)):
        values = RANDOM.normal(0, 1, shape).astype(np.float32)
        use = make_use(values, dtype, panels=True, gated=gated, group=group)
        (weight,), section, _ = packed_section([use], slices, 2)
        rows = read_weight(section, weight)
        assert isinstance(rows, QuantisedRows)
        assert rows.shape == shape
        for expert in range(5):
            alone = quantise(values[expert], use.precision)
            np.testing.assert_array_equal(rows.take(expert).integers, alone.integers)
            np.testing.assert_array_equal(rows.scale[expert], alone.scale)


def test_slices_begin_on_huge_pages_and_hold_all_products() -> None:
    uses = [make_use(RANDOM.normal(0, 1, (80, 16)), DType.F32, panels=True, name=name) for name in "ab"]
    uses.append(make_use(RANDOM.normal(0, 1, (96, 16)), DType.F32, panels=True, gated=True, name="c"))
    uses.append(make_use(RANDOM.normal(0, 1, 7), DType.F32, name="norm"))
    weights, size = place_weights(uses, 2)
    by_name = {weight.name: weight for weight in weights}
    assert by_name["a"].pieces[0].offset == 0
    assert [piece.offset for piece in (by_name["a"].pieces[1],)] == [2 << 20]
    assert by_name["b"].pieces[1].offset == (2 << 20) + by_name["a"].pieces[1].end * 1024 - 2 * 1024
    for weight in weights:
        assert weight.pieces[0].begin == 0
        assert all(a.end == b.begin for a, b in zip(weight.pieces, weight.pieces[1:], strict=False))
        assert all(piece.offset % 64 == 0 for piece in weight.pieces)
    assert all(piece.begin % 2 == 0 for piece in by_name["c"].pieces)
    assert by_name["c"].pieces[-1].end == 6
    assert len(by_name["norm"].pieces) == 1
    assert size >= by_name["norm"].pieces[0].offset + 28


def test_more_slices_than_panels_leave_no_empty_piece() -> None:
    weights, _ = place_weights([make_use(RANDOM.normal(0, 1, (20, 4)), DType.F32, panels=True)], 5)
    assert [(piece.begin, piece.end) for piece in weights[0].pieces] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(("filled", "slices"), [(0.5, 1), (1.9, 1), (2, 2), (3.9, 2), (4, 4), (8, 8), (100, 8)])
def test_slices_are_as_many_as_products_fill(filled: float, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_use(np.zeros((64, 64)), DType.F32)
    uses = [*(make_use(np.zeros((64, 64)), DType.F32, panels=True, name=name) for name in "ab"), table]
    monkeypatch.setattr(pack, "SLICE_BYTES", int(2 * 4 * 64 * 64 / filled))
    assert slice_count(uses) == slices


def test_values_that_are_not_finite_are_counted() -> None:
    values = RANDOM.normal(0, 1, (20, 4))
    values[3, 1] = np.nan
    values[17, :2] = np.inf
    _, _, packer = packed_section([make_use(values, DType.W8, panels=True)], 1)
    assert packer.nonfinite == {"w": 3}
    _, section, packer = packed_section([make_use(values, DType.BF16, panels=True)], 1)
    assert packer.nonfinite == {"w": 3}
    assert np.isnan(bf16_to_float32(section.view(np.uint16))).sum() == 1


def test_work_on_threads_keeps_its_order_and_its_errors() -> None:
    started: list[int] = []

    def work(item: int) -> int:
        started.append(item)
        time.sleep(0.01 if item % 3 == 0 else 0)
        if item == 30:
            raise ValueError("thirty")
        return -item

    done = parallel_map(work, range(100), 3)
    for expected in range(5):
        assert next(done) == -expected
    assert len(started) <= 5 + 4
    with pytest.raises(ValueError, match="thirty"):
        list(done)
    assert max(started) < 40
