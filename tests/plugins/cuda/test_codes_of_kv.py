"""Engines whose KV cache has codes, int8 or FP8, on the emulated GPU: logits, what a cache takes, verification."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from ingot.compare.compare import compare
from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.plan import CacheGroup
from ingot.plugins.cuda.kv_blocks import pack, unpack
from ingot.plugins.cuda.plan_facts import specialisation
from ingot.plugins.cuda.session import device_bytes
from tests.plugins.cuda import test_session as sessions
from tests.plugins.cuda import test_verify as verification

Config = dict[str, object]


@pytest.mark.parametrize("dtype", [DType.I8, DType.F8, DType.BF16])
def test_blocks_are_read_as_they_were_written(dtype: DType) -> None:
    kv = CacheGroup(layers=(0,), kv_heads=2, head_dim=12, tokens_per_block=16, dtype=dtype)
    random, shape = np.random.default_rng(1), (3, kv.kv_heads, kv.tokens_per_block)
    most = 16 if dtype is DType.F8 else 127  # whole numbers that it holds
    numbers = random.integers(-most, most + 1, (*shape, kv.padded_dim)).astype(np.float32)
    scales = random.random(shape).astype(np.float32) if kv.has_codes else np.ones(shape, np.float32)
    packed = pack(numbers, scales, kv)
    assert packed.shape == (3, kv.v_block_bytes)
    for found, wanted in zip(unpack(packed, kv, kv.padded_dim), (numbers, scales), strict=True):
        np.testing.assert_array_equal(found, wanted)


WIDE: Config = {"global_head_dim": 288}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "changes", "kv"),
    [
        *(("llama", "bf16", {}, "int8"), ("llama", "f32", {}, "int8"), ("qwen3", "f16", {}, "int8")),
        *(("gpt2", "w8", {}, "int8"), ("gemma4_text", "bf16", WIDE, "int8"), ("gpt_oss", "f32", {}, "int8")),
        *(("llama", "bf16", {}, "fp8"), ("llama", "f32", {}, "fp8"), ("gemma4_text", "bf16", WIDE, "fp8")),
    ],
)
def test_engines(gpu: ctypes.CDLL, family: str, precision: str, changes: Config, kv: str, tmp_path: Path) -> None:
    """A number between two codes may become the other one, so f32 engines have the tolerance of bf16."""
    engine = sessions._engine(tmp_path, family, changes=changes, precision=precision, kv_cache_dtype=kv)
    sessions._compare(engine, "bf16")
    found = specialisation(open_engine(engine).plan)
    assert found.kv_codes is {"int8": DType.I8, "fp8": DType.F8}[kv]
    assert found.kv is (DType.F32 if precision == "f32" else DType.BF16)


@pytest.mark.slow
def test_a_cache_of_codes(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    """A block takes its codes and scales, and no more; requests are preempted and come back."""
    engine = sessions._engine(tmp_path, "llama", precision="bf16", kv_cache_dtype="int8")
    opened = open_engine(engine)
    (kv,) = opened.plan.caches
    assert kv.block_bytes == 2 * 2 * kv.kv_heads * 16 * (16 + 4)
    session = sessions._gpu(opened, 8)
    expected = device_bytes(opened.plan) + 8 * opened.plan.block_bytes
    assert expected <= gpu.emulated_taken() < expected + 4096
    session.close()
    prompts = [[int(i), 5, 3 + int(i)] * (1 + int(i)) for i in range(1, 9)]
    found = []
    for blocks in (5, 24):
        with sessions._runner(engine, lambda each, blocks=blocks: sessions._gpu(each, blocks)) as runner:  # type: ignore[misc]
            found.append(runner.generate(prompts, max_new_tokens=8, end_id=-1).tolist())
            assert (runner.executor.stats()["preemptions"] > 0) == (blocks == 5)
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_verify_compares_keys_and_values(gpu: ctypes.CDLL, kv: str, tmp_path: Path) -> None:
    engine, checkpoint = verification._built(tmp_path, "llama", "bf16", kv=kv)
    comparison = compare(engine, checkpoint, verification.OPTIONS)
    comparison.raise_if_wrong()
    assert comparison.layers == "compared"
