"""Mixtures of experts end to end: bits that no company changes, experts per token, what inspect says."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.errors import UsageError
from ingot.inspect import inspect
from ingot.runtime import ModelRunner
from tests.handmade import write_model

SIZES = {"num_experts": 24, "num_experts_per_tok": 3, "hidden_size": 40, "moe_intermediate_size": 27}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    model = write_model(folder / "m", {**find_family("qwen3_moe").tiny, **SIZES})
    convert(ConvertOptions(model_dir=model, output_dir=folder / "c"))
    return folder / "c"


def bits(runner: ModelRunner, prompts: list[list[int]]) -> list[bytes]:
    """Of all logits of each prompt."""
    out = runner.generate(
        prompts, max_new_tokens=7, return_dict=True, output_context_logits=True, output_generation_logits=True,
        end_id=-1,
    )  # fmt: skip
    parts = zip(out["context_logits"], out["generation_logits"], strict=True)
    return [b"".join(each.tobytes() for each in pair) for pair in parts]


@pytest.mark.native
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_alone_in_company_and_in_chunks(checkpoint: Path, tmp_path: Path, precision: str) -> None:
    """Tokens that share a step take different experts; few rows and many go different ways through the kernels."""
    build(BuildConfig(precision=precision, max_seq_len=60), checkpoint, tmp_path / "e")
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 61, length).tolist() for length in (1, 37, 5, 16, 18, 2, 9, 1)]
    with ModelRunner.from_dir(tmp_path / "e", threads=1) as runner:
        alone = list(itertools.chain.from_iterable(bits(runner, [prompt]) for prompt in prompts))
    for tokens, batch, threads in ((None, None, 2), (4, 3, 2), (17, 8, 1)):
        with ModelRunner.from_dir(
            tmp_path / "e", max_num_tokens=tokens, max_batch_size=batch, threads=threads
        ) as runner:
            assert bits(runner, prompts) == alone


@pytest.mark.parametrize("precision", ["w8", "w4g32"])
def test_quantised_experts_are_refused(checkpoint: Path, tmp_path: Path, precision: str) -> None:
    with pytest.raises(UsageError, match=r"weights of experts cannot be quantised yet(.|\n)*--precision bf16"):
        build(BuildConfig(target="ref", precision=precision), checkpoint, tmp_path / "e")


def test_inspect_counts_the_experts_of_one_token(checkpoint: Path, tmp_path: Path) -> None:
    build(BuildConfig(target="ref", precision="f32"), checkpoint, tmp_path / "e")
    found = inspect(tmp_path / "e")
    steps = {step["name"]: step for step in found.document["steps"]}
    assert "experts 24, experts_per_token 3" in found.text
    assert "layers.0/moe_router" in steps
    assert "layers.1/moe_route" not in steps, "a layer with a plain MLP"
    assert steps["layers.0/moe_route"]["kernel"] == "moe_route.f32.ref"
    assert steps["layers.0/moe_gate_up"]["operations"] == 2 * 3 * 54 * 40
    # the panels of three experts, gate and up padded to 32 rows each; input, experts' numbers and output
    assert steps["layers.0/moe_gate_up"]["nbytes"] == 3 * 64 * 40 * 4 + 4 * (40 + 3 + 81)
    assert steps["layers.2/moe_down"]["nbytes"] == 3 * 48 * 27 * 4 + 4 * (81 + 3 + 3 + 40)
