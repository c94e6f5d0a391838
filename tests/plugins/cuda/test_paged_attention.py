"""Attention on the emulated GPU against its reference: prefill and decode tiles, splits, groups, windows, caps."""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ingot.dtypes import KV_CODES, DType, from_float32, to_float32
from ingot.plan import Attr
from ingot.plugins.cuda.attention import Places, Scores, attention_launches
from ingot.plugins.cuda.gpu import Device, Kernel
from ingot.plugins.cuda.shapes import takes_warpgroups
from ingot.plugins.op import Array, KvCache
from tests.plugins.cpu.one_step import Input, Packed, batch_of, reference_outputs
from tests.plugins.cuda.one_step import layout_of, run_step
from tests.spanning import often, spanning, values

FAR = 1 << 24  # a block that no memory has
TOLERANCE = {
    DType.BF16: 2.0**-7,
    DType.I8: 2.0**-6,
    DType.F8: 2.0**-6,
    DType.F16: 2.0**-10,
    DType.F32: 4e-6,
}  # probabilities are rounded for the product


def _rounded(values: Array, dtype: DType) -> Array:
    return to_float32(from_float32(values, dtype), dtype)


def check(
    driver: ctypes.CDLL,
    dtype: DType,
    parts: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    shift: float = 0.0,
    rise: float = 0.0,
    splits: int = 1,
    sinks: bool = False,
    slopes: bool = False,
    bf16_bias: bool = False,
    growth: float = 0.0,
    tolerance: float | None = None,
) -> None:
    """parts: (past, new tokens) of each sequence. Blocks lie scattered, those before the window outside the memory of
    the cache; slots that nobody wrote hold NaN. shift: added to queries and taken from keys, so that scores are
    negative. rise: keys of each token are larger by so much of the first's. splits: into how many parts contexts of
    decode are cut."""
    random = np.random.default_rng(heads * dim + window)
    layout = dataclasses.replace(layout_of(dtype, dim, kv_heads, block), window=window)
    needed = [-(-(past + new) // block) for past, new in parts]
    order = random.permutation(sum(needed) + 2)
    tables = [order[begin : begin + n].tolist() for begin, n in zip(np.cumsum([0, *needed]), needed, strict=False)]
    cache = KvCache(layout, len(order))
    for table, (past, new) in zip(tables, parts, strict=True):
        for position in range(past + new):
            keys, values = random.standard_normal((2, 1, kv_heads, dim)).astype(np.float32)
            keys = keys * np.float32(1 + rise * position) - np.float32(shift)
            cache.write(1, table[position // block], np.array([position % block]), keys, values)
        gone = max(past + 1 - window, 0) // block if window else 0
        table[:gone] = [FAR] * gone
    tokens = sum(new for _, new in parts)
    multiplied = DType.BF16 if layout.has_codes else dtype
    q = _rounded(random.standard_normal((tokens, heads * dim)).astype(np.float32) + np.float32(shift), multiplied)
    batch = batch_of(parts, tables)
    attrs: dict[str, Attr] = {
        "layer": 1,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "scale": dim**-0.5,
        "window": window,
        "softcap": softcap,
        "bf16_bias": int(bf16_bias),
        "growth": growth,
        "growth_every": 30,
    }
    kernel = f"paged_attention.{dtype.value}.sm80"
    of_heads = [
        Packed(values=random.random(heads).astype(np.float32) * 2) if each else None for each in (sinks, slopes)
    ]
    inputs: list[Input] = [q, *of_heads]
    (expected,) = reference_outputs(kernel, inputs, attrs, batch, cache)
    (found,) = run_step(driver, kernel, inputs, attrs, batch, cache, parts=splits)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance or TOLERANCE[dtype])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Kernels of decode that are launched while the test runs, and into how many parts they cut."""
    found: list[tuple[str, int]] = []
    launch = Device.launch

    def noted(device: Device, kernel: Kernel, grid: tuple[int, int, int], *rest: Any) -> None:
        if kernel.name in ("attention_decode", "attention_combine"):
            found.append((kernel.name, grid[2]))
        launch(device, kernel, grid, *rest)

    monkeypatch.setattr(Device, "launch", noted)
    return found


MIXED = [(0, 1), (0, 65), (32, 1), (1, 16), (70, 3), (15, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim"),
    [
        pytest.param(DType.BF16, 4, 2, 64, marks=pytest.mark.slow),  # as groups and windows below
        (DType.F16, 4, 2, 16),
        (DType.F32, 4, 2, 16),
        (DType.F16, 4, 2, 64),  # by warpgroups, as bf16
        (DType.BF16, 8, 2, 128),
        (DType.BF16, 3, 1, 256),  # one stage, smaller tiles
        (DType.BF16, 2, 2, 12),  # rows of no whole 16 bytes
        # dims padded to 80; a group that does not divide 16
        pytest.param(DType.BF16, 5, 1, 72, marks=pytest.mark.slow),
    ],
)
def test_mixed_steps(gpu: ctypes.CDLL, dtype: DType, heads: int, kv_heads: int, dim: int) -> None:
    check(gpu, dtype, MIXED, heads=heads, kv_heads=kv_heads, dim=dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        *((1, 1), (14, 2), (16, 1), (24, 1)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((7, 1), (8, 1), (64, 1), (6, 2))),
    ],
)
def test_groups_of_heads(gpu: ctypes.CDLL, heads: int, kv_heads: int) -> None:
    """More than 16 query heads of one KV head go through the larger tile even in decode."""
    check(gpu, DType.BF16, [(40, 1), (0, 7), (63, 2)], heads=heads, kv_heads=kv_heads, dim=64)


WIDE = [  # dtype, query and KV heads, dims, what else
    (DType.BF16, 4, 1, 288, {}),
    (DType.F32, 4, 1, 288, {}),
    (DType.F16, 8, 1, 512, {"sinks": True, "window": 33}),
    (DType.BF16, 8, 1, 512, {"softcap": 1.5}),
    (DType.BF16, 6, 2, 260, {"slopes": True, "growth": 0.5}),  # dims padded to 272: 17 tiles of 16
    (DType.BF16, 24, 1, 288, {}),  # prefill even in decode
    (DType.BF16, 40, 1, 288, {"window": 33}),  # more query heads than rows of a tile
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "dim", "extras"), WIDE)
def test_heads_of_more_than_256_dims(
    gpu: ctypes.CDLL, dtype: DType, heads: int, kv_heads: int, dim: int, extras: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, **extras}
    check(gpu, dtype, [(0, 37), (70, 1), (15, 2)], **sizes)
    if dtype is not DType.F32 and heads // kv_heads <= 16:
        check(gpu, dtype, [(200, 1), (3, 1)], **sizes, splits=3)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "tokens"), [(288, 57), (64, 250), (128, 250)])
def test_rows_have_the_same_bits_in_chunks(gpu: ctypes.CDLL, dim: int, tokens: int) -> None:
    """Whatever rows share their tile, and wherever the chunk begins."""
    random, heads = np.random.default_rng(7), 6
    blocks = [*range(2, -(-tokens // 16)), 0, 1]
    cache = KvCache(layout_of(DType.BF16, dim, 1), len(blocks))
    for pool in (cache.keys, cache.values):
        pool[:] = _rounded(random.standard_normal(pool.shape).astype(np.float32), DType.BF16)
    q = random.standard_normal((tokens, heads * dim)).astype(np.float32)
    attrs: dict[str, Attr] = {
        **{"layer": 1, "heads": heads, "kv_heads": 1, "head_dim": dim, "scale": 0.1, "window": 40, "softcap": 0.0},
        **{"bf16_bias": 0, "growth": 0.0, "growth_every": 1},
    }

    def attend(begin: int, end: int) -> Array:
        batch = batch_of([(begin, end - begin)], [blocks])
        (found,) = run_step(gpu, "paged_attention.bf16.sm80", [q[begin:end], None, None], attrs, batch, cache)
        return found

    whole = attend(0, tokens)
    for cut in (21, 40, tokens - 5):
        np.testing.assert_array_equal(np.concatenate([attend(0, cut), attend(cut, tokens)]), whole)


CODES: list[tuple[int, int, int, dict[str, Any]]] = [  # query and KV heads, dims, what else
    (4, 2, 64, {}),
    (24, 1, 64, {"window": 33}),
    (4, 2, 12, {"sinks": True}),
    (5, 1, 72, {"softcap": 1.5}),
    (3, 1, 256, {}),
    (6, 2, 260, {"slopes": True}),
    (8, 2, 128, {"block": 128, "growth": 0.5}),  # a block has several tiles
    (4, 1, 80, {"block": 48, "window": 33}),  # a tile has parts of blocks
    (17, 1, 112, {"sinks": True}),  # threads and lanes have different numbers of pieces to copy
]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "extras"), CODES)
@pytest.mark.parametrize("dtype", KV_CODES)
def test_caches_of_codes(
    gpu: ctypes.CDLL, dtype: DType, heads: int, kv_heads: int, dim: int, extras: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, **extras}
    check(gpu, dtype, MIXED, **sizes)
    if heads // kv_heads <= 16:
        check(gpu, dtype, [(200, 1), (3, 1)], **sizes, splits=3)


WINDOWS = [(dtype, window) for window in (33, 1, 1000, 16, 64) for dtype in (DType.BF16, DType.F32)]


@pytest.mark.parametrize(("dtype", "window"), spanning(WINDOWS, *values(2)))
def test_windows(gpu: ctypes.CDLL, dtype: DType, window: int) -> None:
    dim = 16 if dtype is DType.F32 else 64
    check(gpu, dtype, [(150, 1), (0, 70), (90, 5)], heads=2, kv_heads=1, dim=dim, window=window)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_softcap(gpu: ctypes.CDLL, dtype: DType) -> None:
    check(gpu, dtype, MIXED, heads=2, kv_heads=1, dim=16 if dtype is DType.F32 else 64, softcap=1.5)


EXTRAS: tuple[dict[str, Any], ...] = (
    {"sinks": True, "window": 33},
    {"sinks": True, "growth": 0.5},
    {"slopes": True},
    {"slopes": True, "bf16_bias": True, "sinks": True},
)


@pytest.mark.parametrize(
    ("dtype", "extras"),
    [
        *((DType.BF16, each) for each in EXTRAS),
        (DType.F32, EXTRAS[3]),
        *(pytest.param(DType.F32, each, marks=pytest.mark.slow) for each in EXTRAS[:3]),
    ],
)
def test_sinks_slopes_and_queries_that_grow(gpu: ctypes.CDLL, dtype: DType, extras: dict[str, Any]) -> None:
    """In tiles of decode and of prefill, and where contexts are cut: a sink counts once."""
    dim = 16 if dtype is DType.F32 else 64
    check(gpu, dtype, [(150, 1), (0, 70), (90, 5)], heads=4, kv_heads=2, dim=dim, **extras)
    if dtype is DType.BF16:
        check(gpu, dtype, [(400, 1), (3, 1)], heads=4, kv_heads=2, dim=dim, splits=3, **extras)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "window"), [(64, 0), (96, 0), (12, 33)])
def test_scores_that_rise(gpu: ctypes.CDLL, dim: int, window: int) -> None:
    """So that prompts choose a new base several times. A token that weighs as much as all together has a weight that is
    rounded to 8 bits, as any other, and a value of up to 4."""
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": dim, "window": window}
    check(gpu, DType.BF16, [(0, 70), (60, 20)], **sizes, rise=0.3, tolerance=4 * 2.0**-8)


@pytest.mark.parametrize("splits", often((1, 2, 3, 7), (1, 7)))
def test_splits(gpu: ctypes.CDLL, launched: list[tuple[str, int]], splits: int) -> None:
    """As many as the plan states; also more than a short sequence has tiles, and with a window."""
    check(gpu, DType.BF16, [(400, 1), (3, 1)], heads=4, kv_heads=1, dim=64, splits=splits)
    check(gpu, DType.BF16, [(400, 2)], heads=4, kv_heads=1, dim=64, window=130, splits=splits)
    kernels = {"attention_decode", "attention_combine"} if splits > 1 else {"attention_decode"}
    assert set(launched) == {(kernel, splits) for kernel in kernels}


@pytest.mark.slow
@pytest.mark.parametrize("dim", [12, 72])
def test_empty_splits_of_padded_heads(gpu: ctypes.CDLL, dim: int) -> None:
    """A split without tokens weighs nothing beside scores of -200, whatever else its warps write to shared memory."""
    shift = 8.0 if dim == 12 else 5.0
    check(gpu, DType.BF16, [(100, 1), (3, 1)], heads=4, kv_heads=1, dim=dim, shift=shift, splits=7)


def test_prompts_take_the_kernel_of_the_machine_code() -> None:
    """That of warpgroups alone in code for sm_90a, for heads that it computes, over a cache of 16 bits."""
    for dtype, dim, code, found in [
        *((dtype, dim, "sm_90a", True) for dtype in (DType.BF16, DType.F16) for dim in (64, 128)),
        *((DType.BF16, 64, code, False) for code in ("sm_80", "sm_89", "sm_100", "sm_120", "")),
        *((DType.BF16, dim, "sm_90a", False) for dim in (12, 72, 96, 256, 512)),
        *((dtype, 64, "sm_90a", False) for dtype in (*KV_CODES, DType.F32)),
    ]:
        assert takes_warpgroups(code, dtype, dim, 16) == found, (dtype, dim, code)
    kv, at = layout_of(DType.BF16, 64), Places(**dict.fromkeys(Places.__dataclass_fields__, 0))
    for scores, kernel in ((Scores(sinks=1), "attention_prompt"), (Scores(softcap=1.5), "attention_prompt_bent")):
        sizes: dict[str, Any] = {"y": 0, "heads": 4, "window": 8, "scale": 1.0, "narrow": False}
        prompt, decode, _ = attention_launches(at, kv, scores, **sizes, multiprocessors=132)
        assert (prompt.kernel, prompt.threads, prompt.shared) == (kernel, 384, 160 << 10)
        assert (decode.kernel, decode.threads) == ("attention_decode", 128)
        assert attention_launches(at, kv, scores, **sizes)[0].kernel == "attention_prefill"
