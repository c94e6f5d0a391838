"""Kernels of latent attention: against the references, and the same bits in every company."""

import numpy as np
import pytest

from ingot.dtypes import DType, from_float32
from ingot.errors import EngineError
from ingot.plan import Attr, CacheGroup
from ingot.plugins.cpu.kv_layout import unpack_rows
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.op import Array, KvCache
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch
from tests.plugins.cpu.one_step import (
    Input,
    Packed,
    activations_of,
    hold,
    native_outputs,
    one_step_plan,
    open_step,
    plain_batch,
    reference_outputs,
    runnable_isa,
)
from tests.plugins.ops.calls import evaluate, make_batch, random_array

pytestmark = pytest.mark.native

BLOCK, BLOCKS = 16, 60
SIZES = ((3, 12, 8), (4, 24, 16), (16, 96, 64), (5, 576, 512), (20, 52, 36))  # heads, head_dim, rank


def _kernels(op: str) -> list[str]:
    return [name for name in kernel_table() if name.startswith(f"{op}.")]


def _group(kernel: str, width: int, rank: int) -> CacheGroup:
    dtype = DType(kernel.split(".")[1])
    return CacheGroup(layers=(0,), kv_heads=1, head_dim=width, tokens_per_block=BLOCK, dtype=dtype, latent=rank)


def _open(
    kernel: str, inputs: list[Input], attrs: dict[str, Attr], batch: StepBatch, group: CacheGroup, threads: int
) -> CpuSession:
    plan, section = one_step_plan(kernel, inputs, attrs, batch, group)
    options = SessionOptions(num_blocks=(BLOCKS,), threads=threads)
    session = open_native(plan, section, options, runnable_isa(kernel))
    session.native.fill_kv(float("nan"))
    hold(session, plan.limits.max_batch_size)
    _write(session, inputs, slice(None))
    return session


def _write(session: CpuSession, values: list[Input], rows: slice) -> None:
    for index, value in enumerate(values):
        if isinstance(value, np.ndarray):
            session.native.write_buffer(f"in{index}", np.ascontiguousarray(value[rows]))


@pytest.mark.parametrize("kernel", _kernels("latent_kv_write"))
def test_rows_are_written(kernel: str) -> None:
    for heads, width, rank in SIZES:
        group, tokens = _group(kernel, width, rank), 21
        attrs: dict[str, Attr] = {"layer": 0, "heads": heads, "kv_heads": 1, "head_dim": width, "rank": rank}
        attrs |= {"interleaved": heads % 2, "norm_eps": 1e-6, "growth": 0.1 * rank, "growth_every": 3}
        values: list[Array] = [
            random_array(tokens, heads * (width - rank + 5)),
            random_array(tokens, width, seed=1),
            random_array(tokens, (width - rank) // 2 * 2, seed=2),
            random_array(rank, seed=3),
        ]
        batch, cache = make_batch([0] * tokens, [20, 1], [3, 16], [[2, 0], [3, 1]]), KvCache(group, BLOCKS)
        (expected,) = evaluate("latent_kv_write", values, attrs, batch, cache)
        inputs: list[Input] = [*values[:3], Packed(values=values[3])]
        session = _open(kernel, inputs, attrs, batch, group, threads=2)
        (got,) = native_outputs(session, batch)
        np.testing.assert_allclose(got, expected, atol=1e-6)
        rows = np.stack([unpack_rows(session.native.read_kv(0, block, False), group) for block in range(BLOCKS)])
        tolerance = 1e-6 if group.dtype is DType.F32 else 2.0**-7
        np.testing.assert_allclose(rows, cache.keys[0], rtol=tolerance, atol=1e-6)
        assert np.array_equal(np.isnan(rows), np.isnan(cache.keys[0])), "slots of others"
        session.close()


@pytest.mark.daily(1)
@pytest.mark.parametrize("kernel", _kernels("latent_attention"))
def test_attention(kernel: str) -> None:
    """Sequences in one step match the reference; alone, in chunks and with other threads they get the same bits. What
    no token sees is NaN."""
    for heads, width, rank in SIZES:
        group = _group(kernel, width, rank)
        attrs: dict[str, Attr] = {"layer": 0, "heads": heads, "kv_heads": 1, "head_dim": width, "rank": rank}
        attrs["scale"] = width**-0.5
        counts, past = [70, 1, 3], [5, 600, 63]
        tables = np.full((3, 40), -1, np.int32)
        order = iter(np.random.default_rng(0).permutation(BLOCKS))
        for s in range(3):
            for place in range(-(-(past[s] + counts[s]) // BLOCK)):
                tables[s, place] = next(order)
        batch = make_batch([0] * sum(counts), counts, past, tables.tolist())
        q, cache = random_array(sum(counts), heads * width, seed=4), KvCache(group, BLOCKS)
        for s in range(3):
            positions = np.arange(past[s] + counts[s])
            latents = random_array(len(positions), 1, width, seed=1000 * s)
            cache.write(0, tables[s, positions // BLOCK], positions % BLOCK, latents, latents[:, :, :rank])
        (expected,) = evaluate("latent_attention", [q], attrs, batch, cache)
        found = []
        for threads in (1, 2):
            session = _open(kernel, [q], attrs, batch, group, threads)
            for block in range(BLOCKS):
                session.native.write_kv(0, block, False, _stored(cache, block))
            (got,) = native_outputs(session, batch)
            np.testing.assert_allclose(got, expected, atol=2e-6 * np.abs(expected).max() + 1e-6)
            found.append(got)
            begin = 0
            for s, count in enumerate(counts):
                for first, last in ((0, 1), (0, count), (count // 2, count)):
                    rows = slice(begin + first, begin + last)
                    _write(session, [q], rows)
                    alone = make_batch([0] * (last - first), [last - first], [past[s] + first], [tables[s].tolist()])
                    assert native_outputs(session, alone)[0].tobytes() == got[rows].tobytes()
                begin += count
            session.close()
        assert found[0].tobytes() == found[1].tobytes()


def _stored(cache: KvCache, block: int) -> bytes:
    return from_float32(np.ascontiguousarray(cache.keys[0, block]), cache.group.dtype).tobytes()


@pytest.mark.parametrize("kernel", _kernels("head_matmul"))
def test_products_of_heads(kernel: str) -> None:
    """40 rows match the reference; any first rows, any row alone, threads and pieces give the same bits."""
    for heads, n, k, kept in ((1, 4, 1, 0), (3, 31, 15, 4), (4, 33, 24, 0), (5, 172, 65, 8), (2, 40, 700, 3)):
        dtype = DType(kernel.split(".")[1])
        weight = Packed(values=random_array(heads, n, k) / np.float32(k**0.5), dtype=dtype, panels=True)
        x = random_array(40, heads * (k + kept), seed=1)
        attrs: dict[str, Attr] = {"heads": heads, "kept": kept, "activations": activations_of(kernel), "group": 0}
        inputs: list[Input] = [x, weight]
        (expected,) = reference_outputs(kernel, inputs, attrs, plain_batch(40))
        sessions = [
            open_step(kernel, inputs, attrs, plain_batch(40), threads=threads, pieces=pieces)
            for threads, pieces in ((1, 1), (2, 2))
        ]
        (whole,) = native_outputs(sessions[0], plain_batch(40))
        np.testing.assert_allclose(whole, expected, atol=4e-6 * np.abs(expected).max())
        assert native_outputs(sessions[1], plain_batch(40))[0].tobytes() == whole.tobytes()
        for number, rows in enumerate((1, 2, 5, 16, 17)):
            (got,) = native_outputs(sessions[number % 2], plain_batch(rows))
            assert got.tobytes() == whole[:rows].tobytes()
        for session, row in zip(sessions, (3, 39), strict=True):
            _write(session, inputs, slice(row, row + 1))
            assert native_outputs(session, plain_batch(1))[0].tobytes() == whole[row : row + 1].tobytes()
            session.close()


def test_kept_columns_from_elsewhere_are_refused() -> None:
    """Only kernels of GPUs take them so."""
    x, weight = random_array(2, 6), Packed(values=random_array(1, 4, 3), panels=True)
    attrs: dict[str, Attr] = {"heads": 1, "kept": 3, "activations": "f32", "group": 0}
    with pytest.raises(EngineError, match="CPU kernels take no input tail, got in2"):
        open_step("head_matmul.f32.avx2", [x, weight, x], attrs, plain_batch(2))
