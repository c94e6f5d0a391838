"""The type of the KV cache, from the option to the bytes: what it costs, what it saves, and that it changes no rule."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ingot.configs.sizes import format_bytes
from ingot.runtime.model_runner import ModelRunner
from tests.e2e.command import ingot

LAYERS, KV_HEADS, DIM, CONTEXT = 4, 2, 64, 512  # of the shipped model


STORED = {"int8": "int8", "fp8": "f8"}  # option → type in the plan


@pytest.fixture(scope="module", params=["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def kv(request: pytest.FixtureRequest) -> str:
    """What --kv_cache_dtype says."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def small_engine(shipped_checkpoint: Path, kv: str) -> Path:
    folder = shipped_checkpoint.with_name(f"{kv}-kv")
    build = ("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", folder, "--kv_cache_dtype", kv)
    told = ingot(*build).succeeds().err
    assert "weights in bf16 (" in told
    assert f"KV cache in {STORED[kv]}" in told
    return folder


@pytest.fixture(scope="module")
def text(shipped_engine: Path) -> list[int]:
    """As many tokens as the model has positions, in its own words."""
    with ModelRunner.from_dir(shipped_engine) as runner:
        out = runner.generate([[1, 1680]], max_new_tokens=CONTEXT - 2, temperature=1.0, random_seed=4, end_id=-1)
    tokens: list[int] = out[0, 0].tolist()
    return tokens


def log_probs(
    engine: Path, prompts: list[list[int]], max_num_tokens: int | None = None
) -> list[npt.NDArray[np.float32]]:
    """Of every token of each prompt, from the raw logits."""
    with ModelRunner.from_dir(engine, max_num_tokens=max_num_tokens) as runner:
        out = runner.generate(prompts, max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    logits: list[npt.NDArray[np.float32]] = out["context_logits"]
    tops = [each.max(axis=1, keepdims=True) for each in logits]
    return [
        each - top - np.log(np.exp(each - top).sum(axis=1, keepdims=True))
        for each, top in zip(logits, tops, strict=True)
    ]


@pytest.mark.slow
def test_inspect_says_what_a_token_takes(small_engine: Path, shipped_engine: Path, kv: str) -> None:
    cache, usual = (
        json.loads(ingot("inspect", each, "--json").out)["caches"][0] for each in (small_engine, shipped_engine)
    )
    assert (cache["dtype"], usual["dtype"]) == (STORED[kv], "bf16")
    assert cache["bytes_per_token"] == LAYERS * KV_HEADS * 2 * (DIM + 4)
    assert usual["bytes_per_token"] == LAYERS * KV_HEADS * 2 * DIM * 2
    text = ingot("inspect", small_engine).out
    assert f"KV cache    {STORED[kv]}, {format_bytes(cache['bytes_per_token'])} a token, 32 tokens a block" in text
    assert f"paged_attention.{STORED[kv]}." in text


def test_the_same_memory_holds_more_tokens(small_engine: Path, shipped_engine: Path) -> None:
    blocks = []
    for engine in (small_engine, shipped_engine):
        with ModelRunner.from_dir(engine, kv_cache_memory="4MiB") as runner:
            blocks.append(runner.stats()["blocks_total"])
    assert blocks == [(4 << 20) // (32 * 1088), (4 << 20) // (32 * 2048)]


@pytest.mark.slow
def test_it_costs_little(small_engine: Path, shipped_engine: Path, text: list[int], kv: str) -> None:
    (found,), (usual,) = log_probs(small_engine, [text]), log_probs(shipped_engine, [text])
    divergence = float((np.exp(usual) * (usual - found)).sum(axis=1).mean())
    most = {"int8": 2e-4, "fp8": 1e-3}[kv]  # three bits of a fraction are fewer than seven of a whole number
    assert 1e-6 < divergence < most, "codes are coarser than bf16, but not much"
    assert np.mean(found.argmax(axis=1) == usual.argmax(axis=1)) > 0.97


def test_no_bit_depends_on_the_company(small_engine: Path, text: list[int]) -> None:
    prompts = [text[:300], text[100:117], text[:7]]
    together = log_probs(small_engine, prompts, max_num_tokens=48)
    for prompt, found in zip(prompts, together, strict=True):
        np.testing.assert_array_equal(log_probs(small_engine, [prompt])[0], found)


@pytest.mark.slow
def test_ref_agrees(shipped_checkpoint: Path, small_engine: Path, kv: str, text: list[int], tmp_path: Path) -> None:
    options = ("--kv_cache_dtype", kv, "--target", "ref")
    ingot("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "ref", *options).succeeds()
    (found,), (expected,) = log_probs(small_engine, [text[:60]]), log_probs(tmp_path / "ref", [text[:60]])
    assert np.abs(found - expected).max() < 0.02 * np.ptp(expected)
