"""Every kernel of the native table against its op's reference, on odd shapes."""

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.plan import Attr, CacheGroup
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.op import Array, KvCache
from ingot.step_io import StepBatch
from tests.plugins.cpu import column_cases, elementwise_cases
from tests.plugins.cpu.one_step import (
    Input,
    Packed,
    Quantised,
    activations_of,
    are_neighbours,
    batch_of,
    native_outputs,
    open_step,
    plain_batch,
    read_cache,
    reference_outputs,
)
from tests.plugins.ops.calls import random_rows

pytestmark = pytest.mark.native

ROWS = (1, 15, 17, 63, 65)
WIDTHS = (1, 4, 15, 17, 63, 65, 172)
HEAD_DIMS = (4, 8, 12, 16, 48, 64, 80, 128, 512)

# Largest difference from the reference, relative to the largest number of the result.
CODES_OF_KV = ("rope_kv_write.int8.", "rope_kv_write.f8.")
TOLERANCE = {
    "embedding": 0.0,
    "gather_rows": 0.0,
    "take_columns": 0.0,
    "gather_columns": 0.0,
    "join_columns": 0.0,
    "add": 0.0,
    "scale": 0.0,
    "softcap": 2e-7,
    "activation": 4e-7,
    "rms_norm": 1e-6,
    "layer_norm": 2e-6,
    "rope_table": 1e-7,
    "rope_kv_write": 3e-7,
    "rope_query": 1e-6,
    "paged_attention": 2e-6,
    "matmul": 4e-6,
    "moe_route": 4e-7,
}
USUAL_TOLERANCE = 4e-7

Case = tuple[list[Input], dict[str, Attr], StepBatch]


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _embedding(dtype: DType) -> Iterator[Case]:
    for tokens, hidden in zip(ROWS, (1, 15, 17, 63, 172), strict=True):
        table, positions = (
            Quantised.of(random_rows(65 + i, hidden), panels=False)
            if dtype is DType.W8
            else Packed(values=_normal(i, 65 + i, hidden), dtype=dtype)
            for i in (0, 1)
        )
        yield [table, None], {"scale": 1.0}, plain_batch(tokens)
        yield [table, positions], {"scale": 6.928203}, plain_batch(tokens)


def _norm(inputs: int) -> Iterator[Case]:
    for rows, hidden in zip((1, 3, 15, 17, 5, 2, 4), WIDTHS, strict=True):
        x, residual = _normal(hidden, rows, hidden) + 2, _normal(hidden + 1, rows, hidden)
        weight, bias = (Packed(values=_normal(hidden + i, hidden)) for i in (2, 3))
        full: list[Input] = [x, weight, residual] if inputs == 3 else [x, weight, bias, residual]
        yield full, {"eps": 1e-5}, plain_batch(rows)
        yield [x, weight, *[None] * (inputs - 2)], {"eps": 1e-6}, plain_batch(rows)


def _gather_rows(dtype: DType) -> Iterator[Case]:
    for rows in ROWS:
        yield [_normal(1, rows, 17)], {}, plain_batch(rows, range(0, rows, 3))


def _rope_table(dtype: DType) -> Iterator[Case]:
    for half in (1, 2, 6, 24, 128):
        inv_freq = Packed(values=(1e4 ** -(np.arange(half) / half)).astype(np.float32))
        yield [inv_freq], {"scale": 1.25}, batch_of([(0, 3), (4000, 2)], [range(1), range(1, 260)])


def _rope_query(dtype: DType) -> Iterator[Case]:
    for index, (rows, dim) in enumerate(zip(ROWS, (4, 12, 80, 256, 512), strict=True)):
        attrs: dict[str, Attr] = {"heads": 3, "head_dim": dim, "interleaved": index % 2, "norm_eps": 1e-5}
        q, turns = _normal(dim, rows, 3 * dim), _normal(1, rows, dim // 4 * 2)
        weights = [Packed(values=_normal(n, n)) for n in (dim, 3 * dim)]
        inputs: list[list[Input]] = [[q, turns, weights[index % 2]], [q, turns, None], [q, None, weights[1]]]
        for given in inputs:
            yield given, attrs, plain_batch(rows)


def _matmul(dtype: DType) -> Iterator[Case]:
    for index, (rows, k) in enumerate(zip((*ROWS, 2, 5), WIDTHS, strict=True)):
        for n, gated in ((15, 0), (65, 0), (34, 1), (128, 1)):
            weight = Packed(values=_normal(k, n, k) / np.float32(k**0.5), dtype=dtype, panels=True, gated=bool(gated))
            out = n // 2 if gated else n
            name = (*ACTIVATIONS, "none", "silu")[index]
            attrs: dict[str, Attr] = {"activation": name, "gated": gated, "activations": "f32", "group": 0}
            extra: list[Input] = [None, None] if index % 2 else [Packed(values=_normal(2, n)), _normal(3, rows, out)]
            yield [_normal(1, rows, k), weight, *extra], attrs, plain_batch(rows)


def _moe_route(dtype: DType) -> Iterator[Case]:
    for index, (experts, slots) in enumerate([(1, 1), (5, 2), (17, 17), (60, 4), (128, 8), (512, 10)]):
        logits = 4 * _normal(index, ROWS[index % 5], experts)
        logits[-1, : experts // 2] = logits[-1].max() + 1  # equal ones
        plain: dict[str, Attr] = {
            "score": "softmax",
            "eps": 0.0,
            "floor": 0.0,
            "scale": 1.0,
            "groups": 1,
            "group_top": 1,
            "group_best": 2,
        }
        yield [logits, None], {**plain, "per_token": slots, "normalized": index % 2}, plain_batch(len(logits))
        more = {**plain, "per_token": slots, "normalized": 1 - index % 2}
        yield [logits[:2], None], more, plain_batch(len(logits[:2]))
        bias = Packed(values=_normal(index, experts), dtype=DType.F32)
        for score in ("softmax", "sigmoid"):
            attrs = {**plain, "score": score, "per_token": slots, "normalized": index % 2, "eps": 0.1, "scale": 2.5}
            yield [logits, bias], attrs, plain_batch(len(logits))
            if experts % 4 == 0:
                attrs |= {"floor": 0.75, "groups": 4, "group_top": 2}
                yield [logits, bias], attrs, plain_batch(len(logits))
                yield [logits, None], {**attrs, "group_best": 1}, plain_batch(len(logits))


CASES: dict[str, Callable[[DType], Iterator[Case]]] = {
    **{
        op: functools.partial(elementwise_cases.elements, op)
        for op in sorted({name.split(".")[0] for name in kernel_table()})
        if elementwise_cases.tries(op)
    },
    "add_gated": elementwise_cases.add_gated,
    "embedding": _embedding,
    "rms_norm": lambda dtype: _norm(3),
    "layer_norm": lambda dtype: _norm(4),
    "activation": elementwise_cases.activation,
    "softcap": elementwise_cases.softcap,
    "gather_rows": _gather_rows,
    "take_columns": column_cases.take_columns,
    "gather_columns": column_cases.gather_columns,
    "join_columns": column_cases.join_columns,
    "rope_table": _rope_table,
    "rope_query": _rope_query,
    "matmul": _matmul,
    "moe_route": _moe_route,
}
# below, test_moe.py, test_paged_attention.py, test_sample.py; products of quantised weights: test_matmul_quantised.py
ELSEWHERE = {
    *("all_reduce", "all_gather"),
    *("send", "recv"),  # tests/e2e/test_pipeline_parallel.py
    "rope_kv_write",
    "moe_gate_up",
    "moe_down",
    "paged_attention",
    "sample",
    "screened_matmul",
    "causal_conv",
    "linear_attention",
    "gated_norm",
    *("mix_streams", "add_to_streams", "match_magnitude", "cut_below"),  # test_streams.py
    *("head_matmul", "latent_attention", "latent_kv_write"),
}


def _close(got: Array, expected: Array, tolerance: float, what: str) -> None:
    assert got.shape == expected.shape, what
    assert not np.isnan(got).any(), what
    scale = float(np.abs(expected).max(initial=0)) or 1.0
    worst = float(np.abs(got.astype(np.float64) - expected).max(initial=0)) / scale
    assert worst <= tolerance, f"{what}: {worst:.2e} beyond {tolerance:.0e}"


KERNELS = [
    name for name in kernel_table() if name.split(".")[0] in CASES and not name.startswith(("matmul.w", "matmul.f8"))
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_matches_the_reference(kernel: str) -> None:
    op, dtype, _ = kernel.split(".")
    for index, (inputs, attrs, batch) in enumerate(CASES[op](DType(dtype))):
        attrs = attrs | {"activations": activations_of(kernel)} if op == "matmul" else attrs
        expected = reference_outputs(kernel, inputs, attrs, batch)
        for threads, pieces in ((1, 1), (2, 2)):
            session = open_step(kernel, inputs, attrs, batch, threads=threads, pieces=pieces)
            got = native_outputs(session, batch)
            for each, wanted in zip(got, expected, strict=True):
                _close(each, wanted, TOLERANCE.get(op, USUAL_TOLERANCE), f"case {index} with {threads} threads")
            session.close()


@pytest.mark.parametrize("kernel", [name for name in kernel_table() if name.startswith("activation.")])
def test_silu_keeps_its_digits(kernel: str) -> None:
    """Small numbers too, which a tolerance of the largest does not see; NaN and infinity stay with their element."""
    x = np.concatenate([np.linspace(-80, 90, 60001), np.geomspace(1e-30, 1e30, 999), -np.geomspace(1e-30, 80, 1000)])
    x = x.astype(np.float32).reshape(-1, 100)
    session = open_step(kernel, [x, None], {"activation": "silu"}, plain_batch(len(x)))
    (got,) = native_outputs(session, plain_batch(len(x)))
    session.close()
    np.testing.assert_allclose(got, x / (1 + np.exp(-x.astype(np.float64))), rtol=3 * 2.0**-24)

    ends = np.array([[-np.inf, -3e38, -88, np.nan, 1, np.inf, 3e38, -np.nan, 2]], np.float32)
    session = open_step(kernel, [ends, None], {"activation": "silu"}, plain_batch(1))
    (got,) = native_outputs(session, plain_batch(1))
    session.close()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(ends))
    assert (got[0, :3] > -1e-35).all()
    assert (got[0, :3] <= 0).all()
    np.testing.assert_array_equal(got[0, 5:7], ends[0, 5:7])


OPS = sorted({name.split(".")[0] for name in kernel_table()})


@pytest.mark.parametrize("op", OPS)
def test_every_op_of_the_table_is_tested(op: str) -> None:
    assert op in CASES or op in ELSEWHERE, (
        f"write what kernels of {op} are tried with: ATTRS in tests/plugins/ops/test_{op}.py if they take ElementsArgs"
        f", else a function as in elementwise_cases.py in CASES, or a test of its own and {op} in ELSEWHERE"
    )


def test_every_op_that_is_tested_is_in_the_table() -> None:
    assert (set(CASES) | ELSEWHERE).issubset(OPS)


def _close_in_cache(got: Array, expected: Array, dtype: DType, tolerance: float) -> None:
    """In bf16 a number may round to the other neighbour of what it is next to the middle of."""
    one_step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(expected), np.abs(got)))) - 7) if dtype is DType.BF16 else 0
    near = np.abs(got - expected) <= np.maximum(one_step, tolerance * (1 + np.abs(expected)))
    assert (near | (np.isnan(got) & np.isnan(expected))).all()


@pytest.mark.daily(1)
@pytest.mark.parametrize("kernel", [name for name in kernel_table() if name.startswith("rope_kv_write.")])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rope_kv_write(kernel: str, interleaved: int) -> None:
    dtype = DType(kernel.split(".")[1])
    for dim in HEAD_DIMS:
        group, kv_heads = 1 + dim % 3, 2
        layout = CacheGroup(layers=(0, 1), kv_heads=kv_heads, head_dim=dim, tokens_per_block=16, dtype=dtype)
        batch = batch_of([(0, 17), (31, 1), (15, 2)], [[9, 4], [2, 7], [0, 5]])
        inputs: list[Input] = [_normal(dim, 20, (group + 2) * kv_heads * dim), _normal(1, 20, dim // 4 * 2)]
        attrs: dict[str, Attr] = {
            "layer": 1,
            "heads": group * kv_heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "interleaved": interleaved,
            "norm_eps": 1e-5,
            "value_norm": 0,
            "keys_as_values": 0,
        }
        one, all_heads = (Packed(values=1 + 0.2 * _normal(n, n)) for n in (dim, group * kv_heads * dim))
        keys_together = Packed(values=1 + 0.2 * _normal(3, kv_heads * dim))
        short = _normal(dim, 20, (group + 1) * kv_heads * dim)  # without values
        for given, more in (
            ([*inputs, None, None], (0, 0)),
            ([inputs[0], None, None, None], (0, 0)),
            ([*inputs, one, one], (0, 0)),
            ([*inputs, all_heads, keys_together], (1, 0)),
            ([short, inputs[1], one, one], (1, 1)),
            ([short, None, None, None], (1, 1)),
            ([short, inputs[1], None, None], (0, 1)),
        ):
            attrs |= dict(zip(("value_norm", "keys_as_values"), more, strict=True))
            cache = KvCache(layout, 10)
            session = open_step(kernel, given, attrs, batch, cache=cache, threads=2)
            got = native_outputs(session, batch)
            expected = reference_outputs(kernel, given, attrs, batch, cache)
            _close(got[0], expected[0], 2 * TOLERANCE["rope_kv_write"], f"queries of head_dim {dim}")
            least = TOLERANCE["rope_kv_write"] * (5 if given[2] or more[0] else 1)
            other_codes = 0
            for block in range(10):
                keys, values = read_cache(session, layout, 1, block)
                scales, value_scales = cache.key_scales[1, block][..., None], cache.value_scales[1, block][..., None]
                if layout.has_codes:
                    are_neighbours(keys / scales, cache.keys[1, block], dtype)
                    same = np.isclose(keys / scales, cache.keys[1, block], rtol=1e-5, atol=0)
                    other_codes += int((~same)[~np.isnan(keys)].sum())
                else:
                    _close_in_cache(keys, cache.keys[1, block], dtype, least)
                if not more[0]:
                    np.testing.assert_array_equal(values[..., :dim], cache.values[1, block] * value_scales)
                elif layout.has_codes:
                    are_neighbours(values[..., :dim] / value_scales, cache.values[1, block], dtype)
                else:
                    _close_in_cache(values[..., :dim], cache.values[1, block], dtype, least)
                written = ~np.isnan(cache.values[1, block][..., 0])
                assert not values[written][:, dim:].any(), "padding of a written value must be zero"
            assert other_codes <= 2, "a key next to the middle of two codes may get either"
            session.close()


@pytest.mark.parametrize("kernel", [name for name in kernel_table() if name.startswith("rope_kv_write.")])
@pytest.mark.parametrize("dim", [4, 20, 64])
def test_rope_kv_write_gives_the_same_bits_in_chunks(kernel: str, dim: int) -> None:
    """Tokens that fill lines of the cache are written together, others one by one."""
    layout = CacheGroup(layers=(0,), kv_heads=2, head_dim=dim, tokens_per_block=48, dtype=DType(kernel.split(".")[1]))
    attrs: dict[str, Attr] = {
        "layer": 0,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": dim,
        "interleaved": 0,
        "norm_eps": 1e-5,
        "value_norm": 0,
        "keys_as_values": 0,
    }
    qkv, angles = _normal(dim, 110, 6 * dim), _normal(1, 110, dim)
    qkv[[3, 40], 2 * dim + 1], qkv[[4, 41], 4 * dim + 3] = np.nan, np.inf
    norm = Packed(values=1 + 0.2 * _normal(2, dim))

    def written(begin: int, end: int, threads: int) -> Array:
        """Keys and values of these tokens, written beside one of another sequence; other slots stay as they were."""
        rows = np.r_[0, begin:end]
        batch = batch_of([(7, 1), (begin, end - begin)], [[1], [4, 0, 2]])
        inputs: list[Input] = [qkv[rows], angles[rows], norm, norm]
        session = open_step(kernel, inputs, attrs, batch, cache=KvCache(layout, 5), threads=threads)
        native_outputs(session, batch)
        blocks = [np.concatenate(read_cache(session, layout, 0, block), axis=-1) for block in (4, 0, 2)]
        session.close()
        slots = np.concatenate(blocks, axis=1)  # [kv_heads, slots, dim + padded dim]
        assert np.isnan(np.delete(slots, slice(begin, end), axis=1)).all()
        return slots[:, begin:end]

    whole = written(0, 110, 1)
    for begin, end, threads in ((0, 110, 3), (0, 5, 1), (5, 37, 2), (30, 110, 4), (47, 48, 2), (63, 98, 7)):
        found = written(begin, end, threads)
        np.testing.assert_array_equal(found.view(np.uint32), whole[:, begin:end].view(np.uint32))


@pytest.mark.parametrize("kernel", [name for name in kernel_table() if name.startswith(CODES_OF_KV)])
@pytest.mark.parametrize("dim", [4, 24, 80])
@pytest.mark.parametrize("tokens", [12, 16])  # one by one, and a whole line
def test_codes_of_rows_that_are_not_finite_or_tiny(kernel: str, dim: int, tokens: int) -> None:
    """The same codes and scales as the reference, bit for bit, NaN included."""
    dtype = DType(kernel.split(".")[1])
    layout = CacheGroup(layers=(0,), kv_heads=1, head_dim=dim, tokens_per_block=16, dtype=dtype)
    attrs: dict[str, Attr] = {"layer": 0, "heads": 1, "kv_heads": 1, "head_dim": dim, "interleaved": 0, "norm_eps": 0.0}
    attrs |= {"value_norm": 0, "keys_as_values": 0}
    rows = _normal(dim, tokens, 3 * dim)
    for token, number in enumerate((np.nan, np.inf, -np.inf, -np.nan, 3e38, -127.0)):
        rows[token, dim + token % dim] = rows[token, 3 * dim - 1] = number
    rows[6] = 0
    rows[7:11] *= np.array([[2e-37], [3e-38], [1e-42], [1e37]], np.float32)
    rows[11] = np.resize([127, 0.5, 1.5, 2.5, -0.5, -3.5, 63.49999, -126.5], 3 * dim)  # halves go to the even code
    if dtype is DType.F8:  # steps of 2^-9 below 2^-6, whose halves go to the even code too; rounded up to 2^-6; to 0
        rows[11] = np.resize([448, 7.5 / 512, -2.5 / 512, 15.4 / 1024, 17, 19, -27, 1.0625, 1e-4, 0.5 / 512], 3 * dim)
    batch, cache = plain_batch(tokens), KvCache(layout, 1)
    session = open_step(kernel, [rows, None, None, None], attrs, batch, cache=cache)
    native_outputs(session, batch)
    reference_outputs(kernel, [rows, None, None, None], attrs, batch, cache)
    keys, values = read_cache(session, layout, 0, 0)
    np.testing.assert_array_equal(keys, cache.keys[0, 0] * cache.key_scales[0, 0][..., None])
    np.testing.assert_array_equal(values[..., :dim], cache.values[0, 0] * cache.value_scales[0, 0][..., None])
    assert np.isnan(keys[0, :4]).all()
    assert np.isnan(values[0, :4]).all()
    assert np.isfinite(values[0, 4:tokens]).all()
    assert not values[0, 9].any()
