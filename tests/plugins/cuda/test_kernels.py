"""Every kernel but attention against its reference, on odd shapes, on the emulated GPU."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from ingot.dtypes import KV_CODES, DType
from ingot.plan import Attr
from ingot.plugins.cuda.bind import ACTIVATIONS
from ingot.plugins.op import Array, KvCache
from ingot.step_io import StepBatch
from tests.plugins.cpu import column_cases
from tests.plugins.cpu.one_step import Input, Packed, are_neighbours, batch_of, plain_batch, reference_outputs
from tests.plugins.cuda.one_step import layout_of, run_step
from tests.spanning import often

ROWS = (1, 2, 3, 15, 17)
TYPES = (DType.BF16, DType.F16, DType.F32)
TOLERANCE = {"embedding": 1e-7, "rope_table": 3e-7, "matmul": 6e-6}  # of the largest value; others 2e-6
KV_TOLERANCE = {DType.BF16: 2.0**-8, DType.F16: 2.0**-10, DType.F32: 1e-6}  # a key may round to the other neighbour

Case = tuple[str, list[Input], dict[str, Attr], StepBatch]


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _embeddings(dtype: DType) -> Iterator[Case]:
    for tokens, hidden in zip(ROWS, (1, 15, 17, 63, 300), strict=True):
        table, positions = (Packed(values=_normal(i, 65, hidden), dtype=dtype) for i in (0, 1))
        for inputs, scale in (([table, None], 1.0), ([table, positions], 6.928203)):
            yield f"embedding.{dtype.value}.sm80", [*inputs], {"scale": scale}, plain_batch(tokens)


def _norms() -> Iterator[Case]:
    for rows, hidden in zip((1, 3, 15, 2, 1, 1), (1, 65, 256, 700, 4100, 8196), strict=True):
        x, residual = _normal(hidden, rows, hidden) + 2, _normal(hidden + 1, rows, hidden)
        weight, bias = (Packed(values=_normal(hidden + i, hidden)) for i in (2, 3))
        eps: dict[str, Attr] = {"eps": 1e-5}
        yield "rms_norm.f32.sm80", [x, weight, residual], eps, plain_batch(rows)
        yield "rms_norm.f32.sm80", [x, weight, None], eps, plain_batch(rows)
        yield "layer_norm.f32.sm80", [x, weight, bias, residual], eps, plain_batch(rows)
        yield "layer_norm.f32.sm80", [x, weight, None, None], eps, plain_batch(rows)


def _elementwise() -> Iterator[Case]:
    wide = np.concatenate([np.linspace(-90, 90, 1031), np.linspace(-9, 9, 1031)]).astype(np.float32).reshape(2, 1031)
    fours = wide.reshape(1, -1)[:, :2060]  # more than a block takes
    for name in ACTIVATIONS:
        yield "activation.f32.sm80", [wide, None], {"activation": name}, plain_batch(2)
        yield "activation.f32.sm80", [wide, _normal(1, 2, 1031)], {"activation": name}, plain_batch(2)
        yield "activation.f32.sm80", [fours, _normal(1, 1, 2060)], {"activation": name}, plain_batch(1)
    for rows in ROWS:
        yield "add.f32.sm80", [_normal(1, rows, 17), _normal(2, rows, 17)], {}, plain_batch(rows)
        yield "gather_rows.f32.sm80", [_normal(1, rows, 317)], {}, plain_batch(rows, range(0, rows, 3))
    yield "gather_rows.f32.sm80", [_normal(1, 4, 2060)], {}, plain_batch(4, (1, 3))
    for cap in (0.5, 30.0):
        yield "softcap.f32.sm80", [wide], {"cap": cap}, plain_batch(2)
        yield "softcap.f32.sm80", [fours], {"cap": cap}, plain_batch(1)
    for factor in (0.0625, -3.0):
        yield "scale.f32.sm80", [wide], {"factor": factor}, plain_batch(2)
        yield "scale.f32.sm80", [fours], {"factor": factor}, plain_batch(1)
    for x, batch in ((wide, plain_batch(2)), (fours, plain_batch(1))):
        yield "sigmoid_gate.f32.sm80", [_normal(4, *x.shape), x], {}, batch
    for half in (1, 6, 128):
        inv_freq = Packed(values=np.float32(1e4) ** -(np.arange(half, dtype=np.float32) / np.float32(half)))
        batch = batch_of([(0, 3), (130000, 2)], [range(1), range(1, 8130)])
        yield "rope_table.f32.sm80", [inv_freq], {"scale": 1.25}, batch


def _matmuls(dtype: DType) -> Iterator[Case]:
    for index, (rows, k) in enumerate(zip(ROWS, (1, 15, 17, 64, 172), strict=True)):
        for n, gated in ((15, 0), (65, 0), (34, 1), (40, 0), (72, 1)):
            weight = Packed(values=_normal(k, n, k) / np.float32(k**0.5), dtype=dtype)
            out = n // 2 if gated else n
            attrs: dict[str, Attr] = {
                "activation": (*ACTIVATIONS,)[index],
                "gated": gated,
                "activations": dtype.value,
                "group": 0,
            }
            bias, residual = Packed(values=_normal(2, n)), _normal(3, rows, out)
            extra = ([None, None], [bias, residual], [None, residual], [bias, None])[(index + n) % 4]
            yield f"matmul.{dtype.value}.sm80.cublaslt", [_normal(1, rows, k), weight, *extra], attrs, plain_batch(rows)


def _streams() -> Iterator[Case]:
    for rows, width, count in zip((1, 3, 2, 1), (1, 15, 64, 1028), (1, 2, 4, 3), strict=True):
        x, made = _normal(width, rows, count * width), 2 * _normal(1, rows, width)
        x[0] *= np.float32(1e-6)
        batch = plain_batch(rows)
        yield "mix_streams.f32.sm80", [x, _normal(2, rows, count * count)], {"streams": count}, batch
        for coefs in (_normal(2, rows, count), None):
            yield "add_to_streams.f32.sm80", [x, made, coefs], {"streams": count, "active": count // 2}, batch
        for joins in (0, 1):
            attrs: dict[str, Attr] = {"streams": count, "joins": joins, "least": 1e-5}
            yield "match_magnitude.f32.sm80", [x, made], attrs, batch
        yield "cut_below.f32.sm80", [3 * made + 1], {"deviations": (1.64, -0.5)[rows % 2]}, batch
        for first, taken in ((0, width), (width // 3, width - width // 3)):
            yield "take_columns.f32.sm80", [x], {"of": width, "first": first, "count": taken}, batch


def _columns() -> Iterator[Case]:
    for op, cases in (("gather_columns", column_cases.gather_columns), ("join_columns", column_cases.join_columns)):
        for inputs, attrs, batch in cases(DType.F32):
            yield f"{op}.f32.sm80", inputs, attrs, batch
    wide, order = (
        _normal(1, 2, 1028),
        np.random.default_rng(2).permutation(1028).astype(np.float32),
    )  # more than a block
    yield "gather_columns.f32.sm80", [wide, Packed(values=order)], {}, plain_batch(2)
    for first, second in ((1028, 64), (1028, 65)):
        yield "join_columns.f32.sm80", [_normal(3, 2, first), _normal(4, 2, second), None], {}, plain_batch(2)


def _check(driver: ctypes.CDLL, case: Case) -> None:
    kernel, inputs, attrs, batch = case
    expected = reference_outputs(kernel, inputs, attrs, batch)
    found = run_step(driver, kernel, inputs, attrs, batch)
    for one, other in zip(found, expected, strict=True):
        scale = max(1.0, float(np.abs(other).max()))
        tolerance = scale * TOLERANCE.get(kernel.split(".")[0], 2e-6)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance, err_msg=f"{kernel} {other.shape} {attrs}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_products_and_tables(gpu: ctypes.CDLL, dtype: DType) -> None:
    for case in (*_embeddings(dtype), *_matmuls(dtype)):
        _check(gpu, case)


def test_norms_and_elementwise_kernels(gpu: ctypes.CDLL) -> None:
    for case in (*_norms(), *_elementwise(), *_streams(), *_columns()):
        _check(gpu, case)


def test_an_epilogue_of_fours_has_the_bits_of_single_columns(gpu: ctypes.CDLL) -> None:
    """Rows of 1,031 columns go one by one, those of 1,032 four by four."""
    x, up = 4 * _normal(1, 2, 1032), _normal(2, 2, 1032)
    for name in ACTIVATIONS:
        fours, single = (
            run_step(gpu, "activation.f32.sm80", [x[:, :cols], up[:, :cols]], {"activation": name}, plain_batch(2))
            for cols in (1032, 1031)
        )
        np.testing.assert_array_equal(fours[0][:, :1031], single[0], name)


@pytest.mark.parametrize("dtype", often(TYPES, (DType.BF16, DType.F32)))
@pytest.mark.parametrize(
    ("interleaved", "rotary", "norm"),
    [
        *((0, 16, ""), (1, 16, "head"), (0, 10, "wide"), (0, 0, "head"), (1, 6, "")),
        *((0, 8, "head"), (1, 8, ""), (0, 16, "wide")),
    ],
)
def test_rope_and_cache(gpu: ctypes.CDLL, dtype: DType, interleaved: int, rotary: int, norm: str) -> None:
    """Also heads of which a part is rotated, by fours or dim by dim."""
    check_rope(gpu, dtype, interleaved, rotary, norm)


@pytest.mark.parametrize(("rotary", "norm", "dim"), [(16, "", 16), (8, "head", 16), (10, "", 12), (8, "wide", 72)])
@pytest.mark.parametrize("dtype", KV_CODES)
def test_caches_of_codes(gpu: ctypes.CDLL, dtype: DType, rotary: int, norm: str, dim: int) -> None:
    """By eights and dim by dim."""
    check_rope(gpu, dtype, 0, rotary, norm, dim=dim)


@pytest.mark.slow
@pytest.mark.parametrize("rotary", [64, 24])
def test_rope_of_padded_heads(gpu: ctypes.CDLL, rotary: int) -> None:
    """Nine of the sixteen threads of a head have dims of it, a tenth the padding of values."""
    check_rope(gpu, DType.BF16, 0, rotary, "head", dim=72)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dim", "rotary", "norm"), [(DType.BF16, 288, 288, "head"), (DType.BF16, 260, 260, "wide")]
)
def test_rope_of_heads_of_more_than_256_dims(gpu: ctypes.CDLL, dtype: DType, dim: int, rotary: int, norm: str) -> None:
    """A thread has several eights of a head, of which the last threads have fewer; or dim by dim."""
    made: dict[str, Attr] = {"value_norm": 1, "keys_as_values": 1}
    check_rope(gpu, dtype, 0, rotary, norm, dim=dim)
    check_rope(gpu, dtype, 1, 64, norm, dim=dim, made=made)


@pytest.mark.parametrize("rotary", [16, 10])
def test_rope_of_many_heads(gpu: ctypes.CDLL, rotary: int) -> None:
    """62 + 2 * 2 heads need two blocks."""
    check_rope(gpu, DType.BF16, 0, rotary, "wide", heads=62)


MADE = [("head", 16, 1, 0, 16), ("wide", 10, 1, 1, 16), ("", 8, 0, 1, 16), ("head", 8, 1, 0, 12)]


@pytest.mark.parametrize(("norm", "rotary", "value_norm", "keys_as_values", "dim"), MADE)
def test_values_that_are_made(
    gpu: ctypes.CDLL, norm: str, rotary: int, value_norm: int, keys_as_values: int, dim: int
) -> None:
    """Normed, and taken from keys."""
    made: dict[str, Attr] = {"value_norm": value_norm, "keys_as_values": keys_as_values}
    check_rope(gpu, DType.BF16, 0, rotary, norm, dim=dim, made=made)


@pytest.mark.parametrize(("norm", "rotary"), [("head", 16), ("wide", 10)])
def test_queries_alone(gpu: ctypes.CDLL, norm: str, rotary: int) -> None:
    check_queries(gpu, norm, rotary)


def check_queries(gpu: ctypes.CDLL, norm: str, rotary: int) -> None:
    """Of a layer that reads the keys of another one."""
    heads, dim = 5, 16
    angles = _normal(2, 7, rotary // 2)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    weight = Packed(values=1 + _normal(3, dim if norm == "head" else heads * dim) / np.float32(4))
    attrs: dict[str, Attr] = {"heads": heads, "head_dim": dim, "interleaved": 0, "norm_eps": 1e-6}
    inputs: list[Input] = [_normal(1, 7, heads * dim), cos_sin, weight]
    (expected,) = reference_outputs("rope_query.f32.sm80", inputs, attrs, plain_batch(7))
    (found,) = run_step(gpu, "rope_query.f32.sm80", inputs, attrs, plain_batch(7), kv=layout_of(DType.F32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)


def check_rope(
    gpu: ctypes.CDLL,
    dtype: DType,
    interleaved: int,
    rotary: int,
    norm: str,
    *,
    heads: int = 5,
    dim: int = 16,
    made: dict[str, Attr] | None = None,
) -> None:
    """Two sequences with scattered blocks, one of which has a past."""
    made = made or {"value_norm": 0, "keys_as_values": 0}
    kv_heads = 2
    cache = KvCache(layout_of(dtype, head_dim=dim, kv_heads=kv_heads), 7)
    expected_cache = KvCache(cache.group, 7)
    batch = batch_of([(0, 3), (30, 4)], [[5], [1, 6, 3]])
    qkv = _normal(1, 7, (heads + (1 if made["keys_as_values"] else 2) * kv_heads) * dim)
    # A key that is zero, one that is too small for codes, and a value with an infinity; beside a key's largest number,
    # denormal ones of FP8.
    if dtype in KV_CODES and not norm:
        qkv[0, heads * dim : (heads + 1) * dim] = 0
        qkv[1, heads * dim : (heads + 1) * dim] *= np.float32(1e-38)
        qkv[2, -1] = np.inf
        of_key = qkv[3, heads * dim : (heads + 1) * dim]
        of_key *= np.float32(2.0**-7)
        of_key[0] = 448
    angles = _normal(2, 7, rotary // 2)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) if rotary else None
    width = {"": (), "head": (dim, dim), "wide": (heads * dim, kv_heads * dim)}[norm]
    norms: list[Input] = [Packed(values=1 + _normal(3, n) / np.float32(4)) for n in width] or [None, None]
    attrs: dict[str, Attr] = {
        "layer": 1,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "interleaved": interleaved,
        "norm_eps": 1e-6 if norm else 0.0,
        **made,
    }
    kernel, inputs = f"rope_kv_write.{dtype.value}.sm80", [qkv, cos_sin, *norms]
    expected = reference_outputs(kernel, inputs, attrs, batch, expected_cache)
    (q,) = run_step(gpu, kernel, inputs, attrs, batch, cache)
    np.testing.assert_allclose(q, expected[0], rtol=0, atol=4e-6)
    if dtype in KV_CODES:
        _compare_codes(cache, expected_cache)
        return
    for one, other in ((cache.keys, expected_cache.keys), (cache.values, expected_cache.values)):
        np.testing.assert_allclose(one, other, rtol=KV_TOLERANCE[dtype], atol=1e-6)  # NaN where nothing was written


def _compare_codes(found: KvCache, expected: KvCache) -> None:
    """A number between two codes may become the other one; scales are NaN where nothing was written."""
    for one, other, scales, wanted in (
        (found.keys, expected.keys, found.key_scales, expected.key_scales),
        (found.values, expected.values, found.value_scales, expected.value_scales),
    ):
        np.testing.assert_allclose(scales, wanted, rtol=1e-6, atol=1e-44)
        there = ~np.isnan(other)
        are_neighbours(one[there], other[there], found.group.dtype)
        assert (one != other)[there].mean() < 0.01
