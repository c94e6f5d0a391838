"""Latent attention on the emulated GPU, and the matmuls of its heads, against the references."""

import ctypes
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType, from_float32, to_float32
from ingot.engine import open_engine
from ingot.errors import BuildError, EngineError
from ingot.plan import Attr, CacheGroup
from ingot.plugins.cuda.plan_facts import specialisation
from ingot.plugins.cuda.shapes import MAX_LATENT_DIM, MAX_RANK
from ingot.plugins.op import Array, KvCache
from ingot.step_io import StepBatch
from tests.plugins.cpu.one_step import Input, Packed, batch_of, plain_batch, reference_outputs
from tests.plugins.cuda.one_step import run_step

TOLERANCE = {DType.BF16: 2.0**-7, DType.F16: 2.0**-10, DType.F32: 4e-6}  # probabilities are rounded for the product
STORED = {DType.BF16: 2.0**-8, DType.F16: 2.0**-10, DType.F32: 1e-6}  # a number may round to the other neighbour
BLOCK = 16
SMALL, WIDE = (28, 20), (576, 512)  # numbers of a row of the cache, and of its value: no whole 16 bytes; DeepSeek's
PARTS = [(0, 1), (0, 37), (70, 1), (15, 2), (33, 3)]


def _rounded(values: Array, dtype: DType) -> Array:
    return to_float32(from_float32(values, dtype), dtype)


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _group(dtype: DType, size: tuple[int, int]) -> CacheGroup:
    width, rank = size
    return CacheGroup(layers=(0, 1), kv_heads=1, head_dim=width, tokens_per_block=BLOCK, dtype=dtype, latent=rank)


def _batch(parts: Sequence[tuple[int, int]]) -> tuple[StepBatch, int]:
    """Scattered blocks, and how many there are."""
    needed = [-(-(past + new) // BLOCK) for past, new in parts]
    order = np.random.default_rng(1).permutation(sum(needed) + 2)
    begins = np.cumsum([0, *needed])
    return batch_of(parts, [order[a : a + n].tolist() for a, n in zip(begins, needed, strict=False)]), len(order)


def check(
    driver: ctypes.CDLL,
    dtype: DType,
    heads: int,
    size: tuple[int, int] = SMALL,
    parts: Sequence[tuple[int, int]] = tuple(PARTS),
    splits: int = 1,
) -> None:
    """Slots that nobody wrote hold NaN."""
    width, rank = size
    batch, blocks = _batch(parts)
    cache = KvCache(_group(dtype, size), blocks)
    for sequence, (past, new) in enumerate(parts):
        positions = np.arange(past + new)
        rows = _normal(sequence, past + new, 1, width)
        cache.write(1, batch.block_tables[0, sequence, positions // BLOCK], positions % BLOCK, rows, rows[..., :rank])
    q = _rounded(_normal(99, len(batch.ids), heads * width), dtype)
    attrs: dict[str, Attr] = {"layer": 1, "heads": heads, "kv_heads": 1, "head_dim": width, "rank": rank}
    attrs["scale"] = width**-0.5
    kernel = f"latent_attention.{dtype.value}.sm80"
    (expected,) = reference_outputs(kernel, [q], attrs, batch, cache)
    (found,) = run_step(driver, kernel, [q], attrs, batch, cache, parts=splits)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * max(1.0, float(np.abs(expected).max())))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "heads"), [(DType.F32, 3), (DType.BF16, 20), (DType.F16, 40), (DType.BF16, 5)])
def test_attention(gpu: ctypes.CDLL, dtype: DType, heads: int) -> None:
    """Heads of one token in several tiles, and heads of several tokens in one."""
    check(gpu, dtype, heads)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "splits"), [(16, 1), (128, 3)])
def test_attention_of_wide_rows(gpu: ctypes.CDLL, heads: int, splits: int) -> None:
    check(gpu, DType.BF16, heads, WIDE, [(70, 1), (0, 1)] if splits > 1 else PARTS[1:4], splits)


@pytest.mark.parametrize("splits", [2, 7])
def test_contexts_in_parts(gpu: ctypes.CDLL, splits: int) -> None:
    """Some of them without tokens."""
    check(gpu, DType.BF16, 20, SMALL, [(100, 1), (3, 1), (130, 1)], splits)


def check_rows(driver: ctypes.CDLL, dtype: DType, *, heads: int, rotary: int, interleaved: int, growth: float) -> None:
    """What is written, and queries; slots of others stay."""
    width, rank = SMALL
    parts = [(3, 20), (16, 1)]
    batch, blocks = _batch(parts)
    tokens, columns = 21, width - rank + 5
    caches = [KvCache(_group(dtype, SMALL), blocks) for _ in range(2)]
    attrs: dict[str, Attr] = {"layer": 1, "heads": heads, "kv_heads": 1, "head_dim": width, "rank": rank}
    attrs |= {"interleaved": interleaved, "norm_eps": 1e-6, "growth": growth, "growth_every": 3}
    angles = _normal(2, tokens, rotary // 2)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) if rotary else None
    inputs: list[Input] = [_normal(0, tokens, heads * columns), _normal(1, tokens, width), cos_sin]
    inputs.append(Packed(values=1 + _normal(3, rank) / np.float32(4)))
    kernel = f"latent_kv_write.{dtype.value}.sm80"
    (expected,) = reference_outputs(kernel, inputs, attrs, batch, caches[0])
    (found,) = run_step(driver, kernel, inputs, attrs, batch, caches[1])
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)
    np.testing.assert_allclose(caches[1].keys, caches[0].keys, rtol=STORED[dtype], atol=1e-6)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("dtype", "heads", "rotary", "interleaved", "growth"),
    [(DType.BF16, 5, 8, 1, 0.0), (DType.F32, 3, 6, 0, 0.1), (DType.F16, 4, 8, 0, 0.0), (DType.BF16, 1, 0, 0, 0.3)],
)
def test_rows_are_written(
    gpu: ctypes.CDLL, dtype: DType, heads: int, rotary: int, interleaved: int, growth: float
) -> None:
    check_rows(gpu, dtype, heads=heads, rotary=rotary, interleaved=interleaved, growth=growth)


HEAD_SHAPES = ((1, 4, 1, 0), (3, 31, 15, 4), (4, 40, 24, 8), (2, 33, 300, 0), (2, 130, 64, 8))  # heads, n, k, kept
ROWS = (1, 8, 20, 70)


def check_heads(driver: ctypes.CDLL, dtype: DType, every: int = 1) -> None:
    """Kept columns are not rounded. In an engine with latents."""
    for number, rows in enumerate(ROWS):
        for heads, n, k, kept in HEAD_SHAPES[number % every :: every]:
            weight = Packed(values=_normal(k, heads, n, k) / np.float32(k**0.5), dtype=dtype)
            x = _normal(rows, rows, heads * (k + kept))
            attrs: dict[str, Attr] = {"heads": heads, "kept": kept, "activations": dtype.value, "group": 0}
            kernel, batch = f"head_matmul.{dtype.value}.sm80", plain_batch(rows)
            (expected,) = reference_outputs(kernel, [x, weight], attrs, batch)
            (found,) = run_step(driver, kernel, [x, weight], attrs, batch, kv=_group(dtype, SMALL))
            np.testing.assert_allclose(found, expected, rtol=0, atol=6e-6 * max(1.0, float(np.abs(expected).max())))
            one, other = (each.reshape(rows, heads, -1)[..., n:] for each in (found, expected))
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32, DType.F16])
def test_products_of_heads(gpu: ctypes.CDLL, dtype: DType) -> None:
    check_heads(gpu, dtype)


@pytest.mark.parametrize("dtype", [DType.BF16])
def test_a_row_of_heads_has_the_same_bits_in_any_batch(gpu: ctypes.CDLL, dtype: DType) -> None:
    heads, n, k, kept = HEAD_SHAPES[-1]
    weight, x = Packed(values=_normal(k, heads, n, k), dtype=dtype), _normal(1, 70, heads * (k + kept))
    attrs: dict[str, Attr] = {"heads": heads, "kept": kept, "activations": dtype.value, "group": 0}
    found = [
        run_step(gpu, "head_matmul.bf16.sm80", [x[:rows], weight], attrs, plain_batch(rows), kv=_group(dtype, SMALL))[0]
        for rows in (70, 20, 3)
    ]
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0][: len(each)])


def test_rows_that_are_too_long_are_refused(tmp_path: Path) -> None:
    """By a build, before any work, and by a session of a plan that was made elsewhere."""
    config = dict(find_family("deepseek_v3").tiny)
    for name, rank in (("a", MAX_RANK), ("b", MAX_RANK + 4)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": rank}))
        convert(ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / name))
    build(BuildConfig(target="ref"), tmp_path / "a", tmp_path / "e")
    with pytest.raises(BuildError, match=r"the rank of latent attention is beyond(.|\n)*at most 512(.|\n)*got: 516"):
        build(BuildConfig(target="cuda/sm90", dry_run=True), tmp_path / "b", tmp_path / "never")
    plan = open_engine(tmp_path / "e").plan
    assert specialisation(plan).latent == MAX_RANK
    wide = dataclasses.replace(plan.caches[0], head_dim=MAX_LATENT_DIM + 4)
    with pytest.raises(EngineError, match=r"latent attention with rows of this size(.|\n)*got: 644, 512"):
        specialisation(dataclasses.replace(plan, caches=(wide, *plan.caches[1:])))
