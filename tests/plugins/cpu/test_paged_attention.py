"""Attention against its reference, and the same bits whatever shares the call."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ingot import _cpu
from ingot.dtypes import KV_CODES, DType, from_float32, to_float32
from ingot.plan import Attr, CacheGroup
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.op import Array, KvCache
from ingot.step_io import StepBatch
from tests.plugins.cpu.one_step import Packed, batch_of, native_outputs, open_step, reference_outputs, runnable_isa
from tests.spanning import spanning

pytestmark = pytest.mark.native

KERNELS = [name for name in kernel_table() if name.startswith("paged_attention.")]
HEAD_DIMS = (4, 8, 12, 16, 24, 48, 64, 80, 96, 128, 256, 512)
FAR = 1 << 30  # a block that no memory has
TOLERANCE = 8e-6  # absolute; values in the cache are of the order of 1
ROUNDING = ("avx512bf16", "avx512bf16emu", "amx", "amxemu")  # these kernels round queries and weights to bf16


def kernels_with(*values: object) -> list[object]:
    """Each kernel with one of the values, and each value with one of the kernels; the others are slow."""
    return spanning(itertools.product(KERNELS, values), lambda kernel, value: kernel, lambda kernel, value: value)


class Sequences:
    """Random queries, keys and values of some sequences, whose blocks lie scattered in a pool of NaN."""

    def __init__(
        self,
        kernel: str,
        totals: Sequence[int],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int = 32,
        window: int = 0,
        softcap: float = 0.0,
        sinks: bool = False,
        slopes: bool = False,
        bf16_bias: int = 0,
        growth: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.kernel = kernel
        self.totals = totals
        self.random = np.random.default_rng(seed)
        dtype = DType(kernel.split(".")[1])
        self.layout = CacheGroup(
            window=window, layers=(0,), kv_heads=kv_heads, head_dim=dim, tokens_per_block=block_size, dtype=dtype
        )
        needed = [-(-total // block_size) for total in totals]
        order = self.random.permutation(sum(needed) + 3)
        self.tables = [
            order[begin : begin + n].tolist() for begin, n in zip(np.cumsum([0, *needed]), needed, strict=False)
        ]
        self.num_blocks = len(order)
        self.queries = [self._normal(total, heads * dim) * 2 for total in totals]
        self.cache = KvCache(self.layout, self.num_blocks)
        for s, total in enumerate(totals):
            keys, values = self._normal(total, kv_heads, dim), self._normal(total, kv_heads, dim)
            self.cache.write(0, *self.slots(s, total), keys, values)
        self.sinks = Packed(values=3 * self._normal(heads), dtype=DType.F32) if sinks else None
        steep = np.linspace(0.4, 0.01, heads, dtype=np.float32)
        self.slopes = Packed(values=steep, dtype=DType.F32) if slopes else None
        self.attrs: dict[str, Attr] = {
            "layer": 0,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "scale": dim**-0.5,
            "window": window,
            "softcap": softcap,
            "bf16_bias": bf16_bias,
            "growth": growth,
            "growth_every": 9,
        }

    def _normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def slots(self, s: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block and slot of each of the first `length` tokens of a sequence."""
        positions, size = np.arange(length), self.layout.tokens_per_block
        return np.asarray(self.tables[s])[positions // size], positions % size

    def call(self, parts: Sequence[tuple[int, int, int]]) -> tuple[Array, StepBatch, KvCache]:
        """(queries, batch, cache) of one step. parts: (sequence, past, new tokens); slots beyond them hold NaN, and
        blocks before the windows are far outside the memory of the cache: a kernel that reads there is ended."""
        cache, tables = KvCache(self.layout, self.num_blocks), []
        size, window = self.layout.tokens_per_block, self.layout.window
        for s, past, new in parts:
            gone = max(past + 1 - window, 0) // size if window else 0
            tables.append([FAR] * gone + self.tables[s][gone:])
            blocks, slots = (each[gone * size :] for each in self.slots(s, past + new))
            for name in ("keys", "values", "key_scales", "value_scales"):
                getattr(cache, name)[0, blocks, :, slots] = getattr(self.cache, name)[0, blocks, :, slots]
        batch = batch_of([(past, new) for _, past, new in parts], tables)
        return np.concatenate([self.queries[s][past : past + new] for s, past, new in parts]), batch, cache

    def run(self, parts: Sequence[tuple[int, int, int]], threads: int = 1) -> list[Array]:
        """Outputs of each part."""
        queries, batch, cache = self.call(parts)
        session = open_step(
            self.kernel, [queries, self.sinks, self.slopes], self.attrs, batch, cache=cache, threads=threads
        )
        out = native_outputs(session, batch)[0]
        session.close()
        return np.split(out, np.cumsum([new for _, _, new in parts])[:-1])

    def check(self, parts: Sequence[tuple[int, int, int]], threads: int = 1, tolerance: float = TOLERANCE) -> None:
        """Compare with the reference.

        Where a kernel rounds them, with that of queries rounded as it does: what is left is that each weight is
        rounded. An output moves by at most 2^-9 of the largest value, since weights are at most 1 and the largest is 1
        exactly; with codes by at most 2^-8 of it, since weights are multiplied by scales first. On average it moves by
        much less.
        """
        queries, batch, cache = self.call(parts)
        found = np.concatenate(self.run(parts, threads))
        rounds = self.kernel.split(".")[2] in ROUNDING
        if rounds:
            positions = np.concatenate([np.arange(past, past + new) for _, past, new in parts])
            grown = 1 + float(self.attrs["growth"]) * np.log(1 + positions // int(self.attrs["growth_every"]))
            scale = (float(self.attrs["scale"]) * grown).astype(np.float32)[:, None]
            queries = to_float32(from_float32(queries * scale, DType.BF16), DType.BF16) / scale
            codes = cache.group.has_codes
            values = cache.values * cache.value_scales[..., None] if codes else cache.values
            tolerance += 2.0 ** (-8 if codes else -9) * float(np.nanmax(np.abs(values)))
        expected = reference_outputs(self.kernel, [queries, self.sinks, self.slopes], self.attrs, batch, cache)[0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
        assert not rounds or np.abs(found - expected).mean() < tolerance / 8


@pytest.mark.daily(1)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_matches_the_reference(kernel: str, dim: int) -> None:
    group = 1 + HEAD_DIMS.index(dim) % 8
    sequences = Sequences(kernel, [1, 65, 33, 17], heads=2 * group, kv_heads=2, dim=dim)
    sequences.check([(0, 0, 1), (1, 0, 65), (2, 32, 1), (3, 1, 16)], threads=2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", range(1, 9))
def test_groups_of_heads(kernel: str, group: int) -> None:
    sequences = Sequences(kernel, [63, 17, 40], heads=group, kv_heads=1, dim=12, block_size=(16, 48, 80)[group % 3])
    sequences.check([(0, 15, 48), (1, 16, 1), (2, 0, 40)])


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name.startswith("paged_attention.f8.")])
def test_every_number_of_fp8_is_read(kernel: str) -> None:
    """Of values; and of keys, by queries of which each picks one number out of the key."""
    numbers = to_float32(np.arange(256, dtype=np.uint8), DType.F8)
    numbers[np.isnan(numbers)] = 0
    sequences = Sequences(kernel, [2], heads=1, kv_heads=1, dim=256)
    blocks, slots = sequences.slots(0, 2)
    for name, scale in (("keys", "key_scales"), ("values", "value_scales")):
        getattr(sequences.cache, name)[0, blocks, :, slots] = [[numbers], [np.zeros_like(numbers)]]
        getattr(sequences.cache, scale)[0, blocks, :, slots] = 1
    (found,) = sequences.run([(0, 0, 1)])[0]  # the weight of one token is 1, or off by an approximation of exp
    np.testing.assert_allclose(found, numbers, rtol=1e-4, atol=0)
    sequences.cache.values[0, blocks, :, slots] = [[np.ones_like(numbers)], [np.zeros_like(numbers)]]
    for dim in np.flatnonzero(numbers):  # the first token's score is 1 or -1, the second one's 0
        sequences.queries[0] = np.zeros((2, 256), np.float32)
        sequences.queries[0][1, dim] = 16 / abs(numbers[dim])
        (found,) = sequences.run([(0, 1, 1)])[0]
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.sign(numbers[dim]))), rtol=0, atol=2e-3)


def test_the_dot_product_agrees_with_its_twin_bit_for_bit() -> None:
    """Queries and values down to denormal numbers; the pairs that a row sees half of, too."""
    made = []
    for kernel in ("paged_attention.bf16.avx512bf16", "paged_attention.bf16.avx512bf16emu"):
        sequences = Sequences(kernel, [130, 65, 33], heads=6, kv_heads=2, dim=20, window=50)
        sequences.queries[0] *= np.float32(1e-39)
        sequences.cache.values[0, :, 0] *= np.float32(1e-38)
        made.append(np.concatenate(sequences.run([(0, 0, 130), (1, 60, 5), (2, 32, 1)])))
    assert made[0].tobytes() == made[1].tobytes()


@pytest.mark.parametrize("dtype", KV_CODES)
@pytest.mark.parametrize("dim", [4, 20, 64, 132])
def test_codes_become_bf16_by_tables_or_without_them(dtype: DType, dim: int) -> None:
    """Every code, in whole tiles, ragged ones and windows, for one to 20 rows; the same bits as the twin's."""
    kernel = f"paged_attention.{dtype.value}.avx512bf16"
    runnable_isa(kernel)
    if not (preferred := _cpu.set_permutes_bytes(False)):
        pytest.skip("this machine lacks AVX512_VBMI")
    codes = np.arange(-127, 128).astype(np.float32)
    if dtype is DType.F8:
        codes = to_float32(np.arange(256, dtype=np.uint8), dtype)
        codes[np.isnan(codes)] = 448
    made = []
    try:
        for name, tables in ((kernel, False), (kernel, True), (kernel + "emu", False)):
            _cpu.set_permutes_bytes(tables)
            sequences = Sequences(name, [300, 130, 5, 64], heads=10, kv_heads=2, dim=dim, window=140)
            for pool in (sequences.cache.keys, sequences.cache.values):
                pool[:] = np.resize(codes, pool.shape)
            parts = [(0, 296, 4), (1, 0, 130), (2, 4, 1), (3, 0, 64)]
            made.append(np.concatenate(sequences.run(parts)).tobytes())
    finally:
        _cpu.set_permutes_bytes(preferred)
    assert made[0] == made[1] == made[2]


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kernel", "block_size"), kernels_with(16, 48, 80, 512))
def test_bits_do_not_depend_on_the_size_of_blocks(kernel: str, block_size: int) -> None:
    parts = [(0, 500, 40), (1, 0, 150), (2, 22, 1)]
    given, usual = (
        Sequences(kernel, [540, 150, 23], heads=7, kv_heads=1, dim=36, block_size=size, window=200)
        for size in (block_size, 32)
    )
    given.queries, numbers = usual.queries, usual.cache
    for s, total in enumerate(usual.totals):
        slots, usual_slots = (each.slots(s, total) for each in (given, usual))
        for name in ("keys", "values", "key_scales", "value_scales"):
            getattr(given.cache, name)[0, slots[0], :, slots[1]] = getattr(numbers, name)[
                0, usual_slots[0], :, usual_slots[1]
            ]
    for found, expected in zip(given.run(parts, threads=2), usual.run(parts, threads=2), strict=True):
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    given.check(parts)


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kernel", "shape"), kernels_with((6, 2, 20), (5, 1, 64), (2, 2, 8)))
def test_same_bits_alone_in_a_batch_and_in_chunks(kernel: str, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    sequences = Sequences(kernel, [150, 40, 70], heads=heads, kv_heads=kv_heads, dim=dim)
    whole = sequences.run([(0, 0, 150)])[0]
    for threads in (1, 2):
        batch = sequences.run([(1, 39, 1), (0, 0, 150), (2, 7, 63)], threads)
        np.testing.assert_array_equal(batch[1].view(np.uint32), whole.view(np.uint32))
    for chunk in (1, 7, 16, 64):
        begins = range(0, 150, chunk) if chunk > 1 else (0, 1, 31, 32, 33, 63, 64, 100, 149)
        for begin in begins:
            new = min(chunk, 150 - begin)
            part = sequences.run([(2, 60, 10), (0, begin, new)], threads=2)[1]
            np.testing.assert_array_equal(part.view(np.uint32), whole[begin : begin + new].view(np.uint32))


@pytest.mark.parametrize("kernel", [name for name in KERNELS if DType(name.split(".")[1]) in KV_CODES])
def test_same_bits_where_a_long_prompt_has_items_of_more_rows(kernel: str) -> None:
    sequences = Sequences(kernel, [150], heads=16, kv_heads=2, dim=20)
    (whole,) = sequences.run([(0, 0, 150)])  # 2 x 1,200 rows; chunks of 40 tokens have 2 x 320
    chunks = [sequences.run([(0, past, min(40, 150 - past))])[0] for past in range(0, 150, 40)]
    assert whole.tobytes() == np.concatenate(chunks).tobytes()


@pytest.mark.daily(1)
@pytest.mark.parametrize("kernel", KERNELS)
def test_same_bits_when_threads_share_the_splits_of_a_context(kernel: str) -> None:
    sequences = Sequences(kernel, [1500, 1030, 300], heads=3, kv_heads=1, dim=16)
    parts = [(0, 1499, 1), (1, 1020, 10), (2, 299, 1)]
    alone, shared = sequences.run(parts, threads=1), sequences.run(parts, threads=3)
    whole = sequences.run([(1, 980, 50)])[0]  # 150 rows: several items, no parallel splits on one thread
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
    np.testing.assert_array_equal(shared[1].view(np.uint32), whole[40:].view(np.uint32))
    sequences.check(parts, threads=3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_far_apart(kernel: str) -> None:
    """Weights that underflow and maxima that move from tile to tile."""
    sequences = Sequences(kernel, [600], heads=2, kv_heads=1, dim=64)
    sequences.queries[0] *= 40
    sequences.check([(0, 590, 10)], threads=2, tolerance=1e-4)  # scores of hundreds keep an error of 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_row_that_is_not_finite_spoils_those_who_see_it_and_nobody_else(kernel: str, which: str) -> None:
    sequences = Sequences(kernel, [90, 40], heads=4, kv_heads=2, dim=24, window=30)
    parts = [(0, 0, 90), (1, 10, 30)]
    calm = sequences.run(parts, threads=2)
    block, slot = (each[37:38] for each in sequences.slots(0, 38))
    good, bad = np.ones((2, 24), np.float32), np.ones((2, 24), np.float32)
    bad[1] = np.nan
    sequences.cache.write(0, block, slot, *((bad[None], good[None]) if which == "key" else (good[None], bad[None])))
    spoilt = sequences.run(parts, threads=2)
    np.testing.assert_array_equal(spoilt[1], calm[1])
    for found, before, heads in zip(
        *(np.hsplit(out[0], [48]) for out in (spoilt, calm)), ("0, 1", "2, 3"), strict=True
    ):
        outside = np.r_[:37, 67:90]
        np.testing.assert_array_equal(found[outside], before[outside])
        assert np.isnan(found[37:67]).all() == (heads == "2, 3")


@pytest.mark.daily(49)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [1, 5, 16, 31, 33, 70, 1000])
def test_windows(kernel: str, window: int) -> None:
    sequences = Sequences(kernel, [130, 65, 33, 17], heads=6, kv_heads=2, dim=12, window=window, softcap=3.0)
    sequences.check([(0, 0, 130), (1, 60, 5), (2, 32, 1), (3, 1, 16)], threads=2)


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kernel", "window"), kernels_with(7, 40, 530))
def test_windows_give_the_same_bits_alone_in_a_batch_and_in_chunks(kernel: str, window: int) -> None:
    """Contexts of several splits, the first of which lie before the window."""
    sequences = Sequences(kernel, [1400, 70], heads=3, kv_heads=1, dim=16, window=window)
    whole = sequences.run([(0, 0, 1400)], threads=2)[0]
    sequences.check([(0, 1200, 200)])
    for begin, new in ((0, 50), (40, 3), (505, 20), (1020, 60), (1399, 1)):
        for threads in (1, 3):
            part = sequences.run([(1, 60, 10), (0, begin, new)], threads)[1]
            np.testing.assert_array_equal(part.view(np.uint32), whole[begin : begin + new].view(np.uint32))


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kernel", "window"), kernels_with(0, 40))
def test_sinks(kernel: str, window: int) -> None:
    """Against the reference; and the same bits alone, in chunks and where threads share the splits of a context."""
    sequences = Sequences(kernel, [1100, 17], heads=6, kv_heads=2, dim=24, window=window, softcap=2.0, sinks=True)
    parts = [(0, 1060, 40), (1, 0, 17)]
    sequences.check(parts)
    whole = sequences.run(parts)[0]
    for begin, new in ((1060, 1), (1075, 20), (1099, 1)):
        part = sequences.run([(1, 16, 1), (0, begin, new)], threads=3)[1]
        np.testing.assert_array_equal(part.view(np.uint32), whole[begin - 1060 : begin - 1060 + new].view(np.uint32))
    without = Sequences(kernel, [1100, 17], heads=6, kv_heads=2, dim=24, window=window, softcap=2.0)
    assert np.abs(without.run(parts)[1] - sequences.run(parts)[1]).max() > 0.1


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kernel", "given"), kernels_with((0, 0, 0.0, 0.3), (1, 0, 0.0, 0.0), (0, 40, 2.0, 0.0)))
def test_slopes(kernel: str, given: tuple[int, int, float, float]) -> None:
    """Against the reference; and the same bits alone, in chunks and where threads share the splits of a context."""
    bf16_bias, window, softcap, growth = given
    facts: dict[str, Any] = {"heads": 6, "kv_heads": 2, "dim": 24, "window": window, "softcap": softcap}
    sequences = Sequences(kernel, [1100, 17], **facts, slopes=True, bf16_bias=bf16_bias, growth=growth)
    parts = [(0, 1060, 40), (1, 0, 17)]
    sequences.check(parts)
    whole = sequences.run(parts)[0]
    for begin, new in ((1060, 1), (1075, 20), (1099, 1)):
        part = sequences.run([(1, 16, 1), (0, begin, new)], threads=3)[1]
        np.testing.assert_array_equal(part.view(np.uint32), whole[begin - 1060 : begin - 1060 + new].view(np.uint32))
    without = Sequences(kernel, [1100, 17], **facts)
    assert np.abs(without.run(parts)[1] - sequences.run(parts)[1]).max() > 0.1
