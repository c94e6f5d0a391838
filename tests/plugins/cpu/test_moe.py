"""Products of experts: right on odd shapes, and the same bits for a row whatever shares the call, threads or pieces."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Attr
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.cpu.target import TARGETS
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.ref.weights import read_weight
from ingot.plugins.target import Product, SessionOptions, Tunable
from ingot.weight_formats import FORMATS
from tests.plugins.cpu.one_step import (
    Input,
    Packed,
    Quantised,
    activations_of,
    native_outputs,
    one_step_plan,
    open_step,
    plain_batch,
    reference_outputs,
    runnable_isa,
)
from tests.plugins.ops.calls import random_f8, random_grouped, random_units
from tests.spanning import isa, precision, spanning

pytestmark = pytest.mark.native

KERNELS = [name for name in kernel_table() if name.startswith(("moe_gate_up.", "moe_down."))]
ROWS = (1, 2, 5, 7, 16, 17, 40)
SHAPES = ((1, 1, 4, 1), (3, 2, 31, 15), (5, 5, 33, 16), (9, 4, 64, 17), (40, 8, 172, 65), (2, 1, 700, 40))
TOLERANCE = 4e-6  # relative to the largest number of the result


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _ids(seed: int, rows: int, experts: int, slots: int) -> Array:
    """Ascending, as moe_route gives them."""
    rng = np.random.default_rng(seed)
    return np.stack([np.sort(rng.permutation(experts)[:slots]) for _ in range(rows)]).astype(np.float32)


def _weight(dtype: str, group: int, experts: int, n: int, k: int, *, gated: bool) -> Packed:
    if dtype in ("w2t", "w3t", "w4t", "w4ts", "w8t", "w8ts"):
        shift, bits = ("zero", "offset")[k % 2] if dtype.endswith("ts") else "", int(dtype[1])
        more, fitting = group == 64 and bits == 4, group if group in FORMATS[dtype].groups else 32
        shape = experts, n, k
        grouped = random_grouped(shape, fitting, shift, more_bits=more, byte_codes=bits == 8, bits=bits)
        return Quantised.of(grouped, gated=gated)
    if dtype in FORMATS and FORMATS[dtype].unit_bytes:
        groups = FORMATS[dtype].groups
        return Quantised.of(random_units(dtype, (experts, n, k), group if group in groups else groups[0]), gated=gated)
    if dtype == "f8":
        return Quantised.of(random_f8((experts, n, k), 0 if n % 2 else group), gated=gated)
    if dtype not in ("w8", "w4"):
        values = _normal(k, experts, n, k) / np.float32(k**0.5)
        return Packed(values=values, dtype=DType(dtype), panels=True, gated=gated)
    random = np.random.default_rng(k + n)
    scale = random.uniform(0.001, 0.1, (experts, n)).astype(np.float32)
    if dtype == "w8":
        codes = random.integers(-127, 128, (experts, n, k)).astype(np.int8)
        return Quantised.of(QuantisedRows(scale=scale, codes=codes), gated=gated)
    codes, groups = random.integers(-8, 8, (experts, n, k)).astype(np.int8), (experts, n, -(-k // group))
    multipliers = (random.integers(1, 16, groups) * random.choice([-1, 1], groups)).astype(np.int8)
    rows = QuantisedRows(scale=scale, codes=codes, multipliers=multipliers, group=group)
    return Quantised.of(rows, gated=gated)


def _case(
    kernel: str,
    experts: int,
    slots: int,
    k: int,
    n: int,
    rows: int = max(ROWS),
    group: int = 32,
    biased: bool = False,
    gates: bool = True,
) -> tuple[list[Input], dict[str, Attr]]:
    """n: columns of one slot's result; group: of w4."""
    op, dtype, _ = kernel.split(".")
    first, stored = op == "moe_gate_up", dtype.removesuffix("a8")
    gated = first and gates
    rows_of_all = experts * (2 * n if gated else n)
    bias = Packed(values=_normal(k + 1, rows_of_all), dtype=DType.F32) if biased else None
    weight = _weight(stored, group, experts, 2 * n if gated else n, k, gated=gated)
    ids = _ids(k + n, rows, experts, slots)
    attrs: dict[str, Attr] = {"activations": activations_of(kernel), "group": weight.group}
    if first and not gates:
        attrs |= {"activation": "relu2", "gated": 0, "limit": 0.0, "alpha": 1.0}
        return [_normal(1, rows, k), ids, weight, bias], attrs
    if gated:
        attrs["gated"] = 1
        limit = 40.0 if stored.startswith("w") else 1.5  # some numbers are beyond it
        attrs |= {"limit": limit, "alpha": 1.702} if biased else {"limit": 0.0, "alpha": 1.0}
        return [_normal(1, rows, k), ids, weight, bias], attrs | {"activation": "silu"}
    return [_normal(1, rows, slots * k), ids, np.abs(_normal(2, rows, slots)), weight, bias], attrs


def _tactics(kernel: str, tactic: int) -> str:
    """That tactic for every number of rows; moe_down has two."""
    return str(tactic if kernel.startswith("moe_gate_up.") else tactic % 2) * 4


def _write(session: CpuSession, inputs: list[Input], rows: slice) -> None:
    for index, value in enumerate(inputs):
        if isinstance(value, np.ndarray):
            session.native.write_buffer(f"in{index}", np.ascontiguousarray(value[rows]))


def _run(session: CpuSession, rows: int) -> Array:
    (y,) = native_outputs(session, plain_batch(rows))
    return y


@pytest.mark.daily(4)
@pytest.mark.parametrize("kernel", spanning(KERNELS, precision, isa))
def test_rows_keep_their_bits_in_every_company(kernel: str) -> None:
    """40 rows match the reference; any first rows, any row alone, threads, pieces and tactics give the same bits."""
    for index, shape in enumerate(SHAPES):
        inputs, attrs = _case(
            kernel, *shape, group=(32, 64, 128)[index % 3], biased=index % 2 == 1, gates=index % 3 < 2
        )
        batch = plain_batch(max(ROWS))
        sessions = [
            open_step(kernel, inputs, attrs, batch, threads=threads, pieces=pieces, tactics=tactics)
            for threads, pieces, tactics in (
                (1, 1, None),
                (2, 2, _tactics(kernel, 1)),
                (1 + index % 5, 1 + index % 3, _tactics(kernel, index % 3)),
            )
        ]
        for session in sessions:
            assert _run(session, max(ROWS)).tobytes() == _run(sessions[0], max(ROWS)).tobytes()
        whole = _run(sessions[0], max(ROWS))
        (expected,) = reference_outputs(kernel, inputs, attrs, batch)
        np.testing.assert_allclose(whole, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))
        for number, rows in enumerate(ROWS):
            session = sessions[(index + number) % len(sessions)]
            assert _run(session, rows).tobytes() == whole[:rows].tobytes(), f"shape {shape}, {rows} rows"
        for session, row in zip(sessions, (3, 16, 39), strict=True):
            _write(session, inputs, slice(row, row + 1))
            assert _run(session, 1).tobytes() == whole[row : row + 1].tobytes(), f"shape {shape}, row {row} alone"
            session.close()


@pytest.mark.parametrize(("kernel", "rows"), spanning(itertools.product(KERNELS, (2, 40)), precision, isa))
def test_experts_that_nobody_takes_are_not_read(kernel: str, rows: int) -> None:
    """Their weights are NaN, as are those of one row's input: neither meets another row."""
    inputs, attrs = _case(kernel, 6, 2, 33, 17, rows)
    weight, ids = inputs[-2], inputs[1]
    assert isinstance(weight, Packed)
    assert isinstance(ids, np.ndarray)
    ids[:] = np.where(ids < 3, [[1, 4]], [[0, 3]])
    if isinstance(weight, Quantised):
        weight.rows.scale[[2, 5]] = np.nan
    else:
        weight.values[[2, 5]] = np.nan
    clean = _run(open_step(kernel, inputs, attrs, plain_batch(rows), threads=2), rows)
    assert np.isfinite(clean).all()
    x = inputs[0]
    assert isinstance(x, np.ndarray)
    x[1, 2] = np.inf
    dirty = _run(open_step(kernel, inputs, attrs, plain_batch(rows), threads=2), rows)
    assert not np.isfinite(dirty[1]).all()
    assert np.delete(dirty, 1, axis=0).tobytes() == np.delete(clean, 1, axis=0).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", spanning(KERNELS, precision, isa))
def test_products_of_many_blocks(kernel: str) -> None:
    """More rows, panels and k of one expert than one block holds; nearly all rows take the same expert."""
    for k, n in ((1100, 40), (40, 700)):
        inputs, attrs = _case(kernel, 4, 2, k, n, rows=270)
        ids = inputs[1]
        assert isinstance(ids, np.ndarray)
        ids[:250] = [[1, 3]]
        batch = plain_batch(270)
        (expected,) = reference_outputs(kernel, inputs, attrs, batch)
        first = _run(open_step(kernel, inputs, attrs, batch), 270)
        np.testing.assert_allclose(first, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))
        for threads, tactic in ((2, 2), (7, 0), (3, 1)):
            tactics = _tactics(kernel, tactic)
            again = _run(open_step(kernel, inputs, attrs, batch, threads=threads, pieces=2, tactics=tactics), 270)
            assert again.tobytes() == first.tobytes()


@pytest.mark.parametrize("kernel", [name for name in KERNELS if ".w4a8." in name])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_experts_of_few_and_of_many_rows(kernel: str, group: int) -> None:
    """In one step codes are multiplied as stored for some experts and unpacked for others: rows keep their bits."""
    takers = (1, 2, 4, 5, 6, 14, 15, 97)
    ids = np.random.default_rng(group).permutation(np.repeat(np.arange(8), takers)).astype(np.float32)
    inputs, attrs = _case(kernel, len(takers), 1, 300, 40, rows=len(ids), group=group)
    inputs[1] = ids[:, None]
    batch = plain_batch(len(ids))
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    session = open_step(kernel, inputs, attrs, batch, threads=2, pieces=2)
    whole = _run(session, len(ids))
    np.testing.assert_allclose(whole, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))
    for row in np.unique(ids, return_index=True)[1]:
        _write(session, inputs, slice(row, row + 1))
        assert _run(session, 1).tobytes() == whole[row : row + 1].tobytes(), f"expert of {takers[int(ids[row])]} rows"


def _patched(weight: Packed) -> Packed:
    """Expert 1 and the last one have numbers of other exponents than all others: of rows side by side, of the last
    column, and several of one tile."""
    values = weight.values.copy()
    _, n, k = values.shape
    for row, column, value in ((0, 0, 3e30), (1, 0, -2e-30), (n - 1, k - 1, 1e-39), (n // 2, k // 2, 5e20)):
        values[1, row % n, column] = values[-1, row, k // 3] = value
    return dataclasses.replace(weight, values=values)


TAKERS = (1, 2, 5, 9, 10, 11, 13, 14, 15, 29, 170)  # rows of each expert, which few and many read in different ways


@pytest.mark.parametrize("level", ["avx512bf16", "avx512bf16emu"])
@pytest.mark.parametrize("op", ["moe_gate_up", "moe_down"])
@pytest.mark.parametrize(("n", "k"), [(65, 300), (24, 1100), (16, 33)])
@pytest.mark.parametrize("patched", [False, True])
def test_compressed_experts_give_the_bits_of_bf16(level: str, op: str, n: int, k: int, patched: bool) -> None:
    """Of any number of rows, in all ways to share the work."""
    ids = np.random.default_rng(k).permutation(np.repeat(np.arange(len(TAKERS)), TAKERS)).astype(np.float32)
    inputs, attrs = _case(f"{op}.bf16.{level}", len(TAKERS), 1, k, n, rows=len(ids), gates=n != 24)
    inputs[1], weight = ids[:, None], inputs[-2]
    assert isinstance(weight, Packed)
    weight = _patched(weight) if patched else weight
    made = []
    for dtype, threads, pieces, tactic in (
        (DType.BF16, 1, 1, 0),
        (DType.BF16C, 1, 1, 0),
        (DType.BF16C, 2, 3, 1),
        (DType.BF16C, 3, 2, 2),
    ):
        inputs[-2], kernel = dataclasses.replace(weight, dtype=dtype), f"{op}.{dtype.value}.{level}"
        batch, tactics = plain_batch(len(ids)), _tactics(kernel, tactic)
        session = open_step(kernel, inputs, attrs, batch, threads=threads, pieces=pieces, tactics=tactics)
        made.append([_run(session, rows).tobytes() for rows in (len(ids), 40, 14, 1)])
        session.close()
    assert all(each == made[0] for each in made)


@pytest.mark.parametrize("level", ["avx512bf16", "avx512bf16emu"])
@pytest.mark.parametrize("op", ["moe_gate_up", "moe_down"])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_compressed_experts_of_any_bytes_stay_in_their_place(level: str, op: str, rows: int) -> None:
    """Patches beyond the panel, or of places beyond their tile: an expert with such bytes has the numbers that they
    stand for, and no other expert has any of them."""
    kernel, k = f"{op}.bf16c.{level}", 300
    inputs, attrs = _case(kernel, 3, 1, k, 40, rows=rows)
    inputs[1] = np.where(np.arange(rows)[:, None] % 3 == 2, np.float32(2), np.float32(1))
    plan, section = one_step_plan(kernel, inputs, attrs, plain_batch(rows))
    weight = inputs[-2]
    assert isinstance(weight, Packed)
    matrix = section.nbytes // 3  # bytes of an expert
    for seed in range(8):
        damaged = section.copy()
        damaged[matrix : 2 * matrix] = np.frombuffer(np.random.default_rng(seed).bytes(matrix), np.uint8)
        values = read_weight(damaged, plan.weights[0])
        assert isinstance(values, np.ndarray)
        inputs[-2] = dataclasses.replace(weight, values=values, dtype=DType.BF16)
        session = open_native(plan, damaged, SessionOptions(num_blocks=(8,), threads=2), runnable_isa(kernel))
        _write(session, inputs, slice(rows))
        got = _run(session, rows)
        session.close()
        plain = open_step(kernel.replace("bf16c", "bf16"), inputs, attrs, plain_batch(rows))
        np.testing.assert_array_equal(got, _run(plain, rows))
        plain.close()


@pytest.mark.parametrize("kernel", spanning(KERNELS, precision, isa))
def test_numbers_of_no_expert_touch_nothing_foreign(kernel: str) -> None:
    inputs, attrs = _case(kernel, 4, 2, 33, 17, rows=7)
    ids = inputs[1]
    assert isinstance(ids, np.ndarray)
    ids[3] = [np.nan, 1e30]
    ids[4] = [-5, -np.inf]
    got = _run(open_step(kernel, inputs, attrs, plain_batch(7)), 7)
    ids[3], ids[4] = [0, 3], [0, 0]
    assert got.tobytes() == _run(open_step(kernel, inputs, attrs, plain_batch(7)), 7).tobytes()


def _levels() -> Iterator[tuple[str, str]]:
    for op, dtype in itertools.product(("moe_gate_up", "moe_down"), ("f32", "bf16", "w8", "w4", "w8a8", "w4a8")):
        whole = ("avxvnni", "avxvnniemu", "amx", "amxemu") if dtype.endswith("a8") else ()
        for level in ("avx512", "avx512emu", *whole):
            yield f"{op}.{dtype}.avx2", f"{op}.{dtype}.{level}"


@pytest.mark.parametrize(("narrow", "wide"), list(_levels()))
def test_vector_levels_agree_bit_for_bit(narrow: str, wide: str) -> None:
    inputs, attrs = _case(narrow, 9, 4, 172, 65, rows=20)
    results = [_run(open_step(kernel, inputs, attrs, plain_batch(20)), 20) for kernel in (narrow, wide)]
    assert results[0].tobytes() == results[1].tobytes()


OWN_PANELS = 0  # blocks that are taken in turn where each thread has panels of its own


def _taken(kernel: str, tactics: str, rows: int) -> int:
    """Blocks that the only thread takes in turn, and the question that ends them.

    There are three experts of ten panels each, of which a row takes two.
    """
    inputs, attrs = _case(kernel, 3, 2, 40, 80 if kernel.startswith("moe_gate_up.") else 160)
    session = open_step(kernel, inputs, attrs, plain_batch(max(ROWS)), tactics=tactics)
    _run(session, rows)
    (taken,) = session.native.items_taken()
    session.close()
    return taken


@pytest.mark.parametrize("kernel", spanning(KERNELS, precision, isa))
def test_tactics_change_how_the_work_is_shared(kernel: str) -> None:
    """One row is few for every kernel, 40 are many. A block of moe_down has 16 panels of all experts, or 8."""
    gated = kernel.startswith("moe_gate_up.")
    blocks, own = (6 + 1,) if gated else (1 + 1, 2 + 1), (OWN_PANELS,)
    for rows, as_shipped, otherwise in ((1, own, blocks), (40, blocks, own)):
        assert _taken(kernel, "0000", rows) in as_shipped
        assert _taken(kernel, "1111", rows) in otherwise
        if gated:
            assert _taken(kernel, "2222", rows) == (2 if rows == 1 else 3) + 1


@pytest.mark.parametrize("kernel", ["moe_gate_up.w8.avx2", "moe_gate_up.bf16.amxemu"])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40])
def test_each_class_of_rows_has_a_tactic(kernel: str, rows: int) -> None:
    tactics = "".join("2" if first <= rows <= last else "0" for first, last in ((1, 1), (2, 8), (9, 32), (33, 40)))
    whole = len(set(_ids(40 + 80, max(ROWS), 3, 2)[:rows].ravel())) + 1
    assert _taken(kernel, tactics, rows) == whole
    assert _taken(kernel, tactics.translate({ord("0"): "2", ord("2"): "0"}), rows) != whole


@pytest.mark.parametrize(("kernel", "ways"), [("moe_gate_up.w8a8.avx2", 3), ("moe_down.w8a8.avx2", 2)])
def test_tactics_that_are_none_are_refused(kernel: str, ways: int) -> None:
    product = Product(
        kernel=kernel, n=32, k=40, group=0, gated=kernel.startswith("moe_gate_up."), panel_bytes=1, experts=9, slots=4
    )
    (target,) = (each for each in TARGETS if each.name == "cpu/avx2")
    assert isinstance(target, Tunable)
    assert ways == len(target.tactics(product, 1)) == len(target.tactics(product, 8))
    _taken(kernel, f"000{ways - 1}", 1)
    for tactics in ("", "000", "00000", f"000{ways}", "000x"):
        with pytest.raises(EngineError, match=f"four digits, each below {ways}"):
            _taken(kernel, tactics, 1)


@pytest.mark.parametrize("op", ["moe_gate_up", "moe_down"])
def test_lists_of_sorted_rows_are_refused(op: str) -> None:
    """Only kernels of GPUs take them."""
    rows, ids, weight = _normal(1, 2, 4), _ids(1, 2, 3, 1), _weight("f32", 0, 3, 6, 4, gated=False)
    inputs: list[Input] = [rows, ids, weight, None, np.zeros((2, 5), np.float32)]
    attrs: dict[str, Attr] = {"activations": "f32", "group": 0}
    if op == "moe_down":
        inputs.insert(2, ids)
    else:
        attrs |= {"activation": "relu2", "gated": 0, "limit": 0.0, "alpha": 1.0}
    with pytest.raises(EngineError, match="CPU kernels take no input lists"):
        open_step(f"{op}.f32.avx2", inputs, attrs, plain_batch(2))
