"""Quantised engines as users build them: sizes, the bits of a request in every company, and the numpy references."""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.engine import read_manifest, read_plan
from ingot.runtime.model_runner import ModelRunner
from tests.builder.engines import engine_logits
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model

# K = 40, 172 and 48, N = 61: nothing is a multiple of a panel, a tile or a group
ODD = {
    **TINY_LLAMA,
    "hidden_size": 40,
    "intermediate_size": 172,
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "model_type": "qwen3",
}
KINDS = [
    ("w8", "int8"),
    ("w8", "bf16"),
    ("w4g32", "int8"),
    ("w4g32", "bf16"),
    ("w4g64", "int8"),
    ("w4g128", "int8"),
    ("w4g128", "bf16"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    ingot("convert", "--model_dir", write_model(folder / "m", ODD), "--output_dir", folder / "c").succeeds()
    return folder / "c"


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Path:
    precision, activations = request.param
    folder = checkpoint.with_name(f"{precision}-{activations}")
    options = (
        "--precision",
        precision,
        "--activations",
        activations,
        "--tokens_per_block",
        16,
        "--kv_cache_dtype",
        "f32",
    )
    ingot("build", "--checkpoint_dir", checkpoint, "--output_dir", folder, *options).succeeds()
    return folder


def bits(runner: ModelRunner, prompts: list[list[int]], count: int = 12) -> list[tuple[bytes, bytes]]:
    """Of all logits of each prompt, drawn so that every bit counts."""
    out = runner.generate(
        prompts,
        max_new_tokens=count,
        temperature=0.9,
        random_seed=5,
        end_id=-1,
        return_dict=True,
        output_context_logits=True,
        output_generation_logits=True,
    )
    return [(out["context_logits"][i].tobytes(), out["generation_logits"][i].tobytes()) for i in range(len(prompts))]


@pytest.mark.daily(1)
def test_no_bit_depends_on_the_company(engine: Path) -> None:
    random = np.random.default_rng(4)
    prompts = [random.integers(0, 61, length).tolist() for length in (1, 40, 17, 5, 33)]
    with ModelRunner.from_dir(engine, threads=1) as runner:
        alone = [bits(runner, [prompt])[0] for prompt in prompts]
        assert bits(runner, prompts) == alone
    with ModelRunner.from_dir(engine, max_num_tokens=7, threads=3) as runner:
        assert bits(runner, prompts) == alone


@pytest.mark.daily(1)
def test_no_bit_depends_on_preemption(engine: Path) -> None:
    prompts = [[n] * 9 for n in range(6)]
    with ModelRunner.from_dir(engine, threads=1) as runner:
        calm = bits(runner, prompts, 40)
    with ModelRunner.from_dir(engine, kv_cache_memory=8 * read_plan(engine).block_bytes) as runner:
        assert bits(runner, prompts, 40) == calm
        assert runner.stats()["preemptions"] > 0


def test_kernels_follow_the_references(engine: Path) -> None:
    ids = np.random.default_rng(6).integers(0, 61, (2, 30))
    expected = engine_logits(engine, ids)
    with ModelRunner.from_dir(engine, threads=1) as runner:
        out = runner.generate(ids.tolist(), max_new_tokens=1, return_dict=True, output_context_logits=True)
    # where activations are rounded to int8 or bf16, a last bit may move one of them by a whole step
    rounds = any(step.attrs.get("activations", "f32") != "f32" for step in read_plan(engine).steps)
    tolerance = 5e-3 if rounds or read_manifest(engine).target == "cpu/amx" else 1e-5
    assert np.abs(np.stack(out["context_logits"]) - expected).max() < tolerance * np.ptp(expected)


def test_inspect_lists_the_choice(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        'precision = "w4g64"\n[[layers]]\npattern = "layers.1/down"\nprecision = "w8"\nactivations = "bf16"\n'
    )
    build = ("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", "--config", tmp_path / "r.toml")
    assert "int8 activations in 12 of 12 matmuls" in ingot(*build).succeeds().err
    steps = {
        step["name"]: step for step in json.loads(ingot("inspect", tmp_path / "e", "--json").succeeds().out)["steps"]
    }
    chosen = {name: (steps[name]["precision"], steps[name]["activations"]) for name in ("layers.0/down", "lm_head")}
    assert chosen == {"layers.0/down": ("w4g64", "int8"), "lm_head": ("w8", "int8")}
    assert steps["layers.1/down"]["precision"] == "w8"
    assert steps["layers.1/down"]["int8_error"] is None
    assert 0 < steps["layers.0/down"]["int8_error"] < 0.05
    text = ingot("inspect", tmp_path / "e", "--all").succeeds().out
    assert "int8 error" in text
    assert "w4g64" in text
    ingot("verify", tmp_path / "e").succeeds()


def test_a_pattern_that_fits_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('precision = "w8"\n[[layers]]\npattern = "layer.*/down"\nprecision = "bf16"\n')
    build = ("build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e", "--config", tmp_path / "r.toml")
    ingot(*build).fails("fits no matmul", "layer.*/down", "layers.0/qkv", code=2)
    (tmp_path / "r.toml").write_text('precison = "w8"\n')
    ingot(*build).fails("unknown key", "did you mean 'precision'?")
