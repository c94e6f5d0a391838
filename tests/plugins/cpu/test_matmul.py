"""Matrix products: right on odd shapes, and the same bits for a row whatever shares the call, threads or pieces."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from ingot.dtypes import DType, round_to_bf16
from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.op import Array
from ingot.plugins.target import SessionOptions
from tests.plugins.cpu.one_step import (
    Input,
    Packed,
    activations_of,
    native_outputs,
    one_step_plan,
    open_step,
    plain_batch,
    reference_outputs,
    runnable_isa,
)

pytestmark = pytest.mark.native

KERNELS = [name for name in kernel_table() if name.startswith(("matmul.f32.", "matmul.bf16.", "matmul.bf16c."))]
ROWS = (1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 33, 63, 65)
KS = (1, 4, 31, 32, 33, 64, 172, 300)
NS = (1, 15, 16, 17, 48, 65, 130)
TOLERANCE = 4e-6  # relative to the largest number of the result


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _attrs(kernel: str, activation: str = "none", gated: bool = False) -> dict[str, Attr]:
    return {"activation": activation, "gated": int(gated), "activations": activations_of(kernel), "group": 0}


def _weight(kernel: str, n: int, k: int, gated: bool = False) -> Packed:
    values = _normal(n * 1000 + k, n, k) / np.float32(k**0.5)
    return Packed(values=values, dtype=DType(kernel.split(".")[1]), panels=True, gated=gated)


def _cases(kernel: str) -> Iterator[tuple[list[Input], dict[str, Attr]]]:
    """Every K with half of the Ns; activation, gate, bias and residual go round. 65 rows of x."""
    pairs = [(k, NS[i]) for number, k in enumerate(KS) for i in range(number % 2, len(NS), 2)]
    for index, (k, out) in enumerate(pairs):
        gated = index % 3 == 0
        n = 2 * out if gated else out
        bias = Packed(values=_normal(index, n)) if index % 2 else None
        residual = _normal(index + 1, max(ROWS), out) if index % 4 < 2 else None
        attrs = _attrs(kernel, tuple(ACTIVATIONS)[index % len(ACTIVATIONS)], gated)
        yield [_normal(index + 2, max(ROWS), k), _weight(kernel, n, k, gated), bias, residual], attrs


def _run(session: CpuSession, rows: int) -> Array:
    (y,) = native_outputs(session, plain_batch(rows))
    return y


@pytest.mark.daily(1)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_keep_their_bits_in_every_company(kernel: str) -> None:
    """65 rows match the reference; any first rows, any row alone, threads and pieces give the same bits."""
    for index, (inputs, attrs) in enumerate(_cases(kernel)):
        sessions = [
            open_step(kernel, inputs, attrs, plain_batch(max(ROWS)), threads=threads, pieces=pieces)
            for threads, pieces in ((1, 1), (2, 2), (1 + index % 5, 1 + index % 3))
        ]
        whole = _run(sessions[0], max(ROWS))
        (expected,) = reference_outputs(kernel, inputs, attrs, plain_batch(max(ROWS)))
        np.testing.assert_allclose(whole, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))
        for number, rows in enumerate(ROWS):
            session = sessions[(index + number) % len(sessions)]
            assert _run(session, rows).tobytes() == whole[:rows].tobytes(), f"case {index}, {rows} rows"
        for session, row in zip(sessions, (16, 33, 64), strict=True):
            for name, value in (("in0", inputs[0]), ("in3", inputs[3])):
                if isinstance(value, np.ndarray):
                    session.native.write_buffer(name, value[row : row + 1])
            assert _run(session, 1).tobytes() == whole[row : row + 1].tobytes(), f"case {index}, row {row} alone"
            session.close()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_nan_and_infinity_stay_in_their_row(kernel: str, rows: int) -> None:
    """K = 33 leaves padding in the last tile of k, N = 17 padding columns: neither may meet them."""
    weight, attrs = _weight(kernel, 17, 33), _attrs(kernel)
    x = _normal(1, rows, 33)
    clean = native_outputs(open_step(kernel, [x, weight, None, None], attrs, plain_batch(rows)), plain_batch(rows))[0]
    for position, value in ((0, np.nan), (32, np.inf), (31, -np.inf)):
        for bad in {0, rows // 2, rows - 1}:
            dirty = x.copy()
            dirty[bad, position] = value
            session = open_step(kernel, [dirty, weight, None, None], attrs, plain_batch(rows), threads=2)
            got = _run(session, rows)
            assert not np.isfinite(got[bad]).any()
            assert np.delete(got, bad, axis=0).tobytes() == np.delete(clean, bad, axis=0).tobytes()
            session.close()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_the_residual_may_be_the_output(kernel: str, rows: int) -> None:
    inputs: list[Input] = [_normal(1, rows, 300), _weight(kernel, 50, 300), None, _normal(2, rows, 50)]
    attrs, batch = _attrs(kernel, "gelu"), plain_batch(rows)
    apart = _run(open_step(kernel, inputs, attrs, batch), rows)
    plan, section = one_step_plan(kernel, inputs, attrs, batch)
    plan = dataclasses.replace(plan, steps=(dataclasses.replace(plan.steps[0], outputs=("in3",)),))
    session = open_native(plan, section, SessionOptions(num_blocks=(8,), threads=2), runnable_isa(kernel))
    for index in (0, 3):
        value = inputs[index]
        assert isinstance(value, np.ndarray)
        session.native.write_buffer(f"in{index}", value)
    assert _run(session, rows).tobytes() == apart.tobytes()


@pytest.mark.daily(4)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(150, 70, 1100), (3, 1500, 70), (20, 300, 700), (530, 20, 40), (300, 1792, 40), (3, 2072, 2048)],
)
def test_products_of_many_blocks(kernel: str, rows: int, n: int, k: int) -> None:
    """More rows, panels and k than one block holds, more y than L2, panels that are left for the first to finish; the
    same bits on any threads and for fewer rows."""
    inputs: list[Input] = [_normal(1, rows, k), _weight(kernel, n, k), None, None]
    attrs, batch = _attrs(kernel), plain_batch(rows)
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    session = open_step(kernel, inputs, attrs, batch, threads=1)
    first = _run(session, rows)
    np.testing.assert_allclose(first, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))
    assert _run(session, rows // 2).tobytes() == first[: rows // 2].tobytes()
    for threads in (2, 3, 16):
        assert (
            _run(open_step(kernel, inputs, attrs, batch, threads=threads, pieces=2), rows).tobytes() == first.tobytes()
        )


@pytest.mark.parametrize("level", ["avx512", "avx512emu"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_vector_levels_agree_bit_for_bit(dtype: str, level: str) -> None:
    inputs: list[Input] = [_normal(1, 20, 172), _weight(f"matmul.{dtype}.{level}", 130, 172, True), None, None]
    attrs = _attrs(f"matmul.{dtype}.{level}", "silu", True)
    narrow, wide = (
        _run(open_step(f"matmul.{dtype}.{each}", inputs, attrs, plain_batch(20)), 20) for each in ("avx2", level)
    )
    assert narrow.tobytes() == wide.tobytes()


def _any_bits(seed: int, shape: tuple[int, int], lowest: int, highest: int) -> Array:
    """Floats of random sign and mantissa; their exponents lie in [lowest, highest)."""
    random = np.random.default_rng(seed)
    sign, mantissa = random.integers(0, 2, shape), random.integers(0, 1 << 23, shape)
    bits = sign << 31 | random.integers(lowest, highest, shape) << 23 | mantissa
    return bits.astype(np.uint32).view(np.float32)


def test_the_dot_product_agrees_with_its_twin_bit_for_bit() -> None:
    """Finite numbers of any bits: denormal ones count as zero going in, and come out as zero."""
    for k, lowest, highest in ((1, 0, 255), (33, 0, 90), (64, 90, 160), (300, 0, 255)):
        x, weights = (_any_bits(seed, (40, k), lowest, highest) for seed in (k, k + 1))
        weight = Packed(values=round_to_bf16(weights), dtype=DType.BF16, panels=True)
        made = [
            _run(open_step(kernel, [x, weight, None, None], _attrs(kernel), plain_batch(40)), 40)
            for kernel in ("matmul.bf16.avx512bf16", "matmul.bf16.avx512bf16emu")
        ]
        np.testing.assert_array_equal(np.isnan(made[0]), np.isnan(made[1]))
        clean = np.nan_to_num(made[0], nan=0.0), np.nan_to_num(made[1], nan=0.0)
        assert clean[0].tobytes() == clean[1].tobytes()


def _with_patches(weight: Packed) -> Packed:
    """Some numbers get other exponents than all others: of rows side by side, of the last, and several of one tile."""
    values = weight.values.copy()
    n, k = values.shape
    for row, column, value in ((0, 0, 3e30), (1, 0, -2e-30), (n - 1, k - 1, 1e-39), (n // 2, k // 2, 5e20)):
        values[row % n, column] = value
    return dataclasses.replace(weight, values=values)


@pytest.mark.parametrize("level", ["avx512bf16", "avx512bf16emu"])
@pytest.mark.parametrize(("n", "k"), [(65, 300), (24, 2048), (48, 1100), (16, 33)])
@pytest.mark.parametrize("patched", [False, True])
def test_compressed_weights_give_the_bits_of_bf16(level: str, n: int, k: int, patched: bool) -> None:
    """For any number of rows: those that read weights as they are stored, once or in passes, and those that leave them
    restored, by blocks."""
    for gated, threads in ((False, 1), (True, 2)):
        count = 2 * n if gated else n
        weight = _weight("matmul.bf16", count, k, gated)
        weight = _with_patches(weight) if patched else weight
        for rows in (1, 2, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 23, 25, 36, 37, 64, 170):
            made = []
            for dtype, tactics in ((DType.BF16, None), (DType.BF16C, None), (DType.BF16C, "1111")):
                if tactics and not 2 <= rows <= 36:
                    continue
                kernel = f"matmul.{dtype.value}.{level}"
                inputs: list[Input] = [_normal(rows, rows, k), dataclasses.replace(weight, dtype=dtype), None, None]
                attrs = _attrs(kernel, "silu" if gated else "none", gated)
                session = open_step(kernel, inputs, attrs, plain_batch(rows), threads=threads, tactics=tactics)
                made.append(_run(session, rows).tobytes())
                session.close()
            assert all(each == made[0] for each in made), f"{rows} rows"


@pytest.mark.parametrize("level", ["avx512bf16", "avx512bf16emu"])
@pytest.mark.parametrize("rows", [1, 9, 20, 40])
def test_compressed_weights_of_any_bytes_stay_in_their_place(level: str, rows: int) -> None:
    """Patches beyond the panel, or of places beyond their tile: whatever comes out, nothing else is read or written."""
    kernel = f"matmul.bf16c.{level}"
    weight = dataclasses.replace(_weight(kernel, 40, 300), dtype=DType.BF16C)
    plan, section = one_step_plan(
        kernel, [_normal(1, rows, 300), weight, None, None], _attrs(kernel), plain_batch(rows)
    )
    for seed in range(8):
        damaged = np.frombuffer(np.random.default_rng(seed).bytes(section.nbytes), np.uint8)
        session = open_native(plan, damaged, SessionOptions(num_blocks=(8,), threads=2), runnable_isa(kernel))
        session.native.write_buffer("in0", _normal(1, rows, 300))
        assert _run(session, rows).shape == (rows, 40)
        session.close()


@pytest.mark.parametrize(
    "kernel", [f"matmul.bf16.{level}" for level in ("amx", "amxemu", "avx512bf16", "avx512bf16emu")]
)
def test_x_is_rounded_to_bf16(kernel: str) -> None:
    x, weight = _normal(1, 3, 64), _weight(kernel, 16, 64)
    exact, rounded = (
        _run(open_step(kernel, [each, weight, None, None], _attrs(kernel), plain_batch(3)), 3)
        for each in (x, round_to_bf16(x))
    )
    assert exact.tobytes() == rounded.tobytes()
