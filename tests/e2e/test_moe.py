"""Mixtures of experts end to end: bits that no company changes, experts per token, what inspect says."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from ingot.builder import tune
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.recipe import LayerRule
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.engine import read_manifest, read_plan
from ingot.errors import UsageError
from ingot.inspect import inspect
from ingot.runtime import ModelRunner
from tests.builder.engines import engine_logits
from tests.e2e.command import ingot
from tests.handmade import write_model
from tests.spanning import spanning, values

QUANTISED = [
    ("w8", "int8"),
    ("w8", "bf16"),
    ("w4g32", "int8"),
    ("w4g32", "bf16"),
    ("w4g64", "auto"),
    ("w4g128", "auto"),
]
OTHERS = [
    ("glm4_moe", "w8", "int8"),
    ("glm4_moe", "bf16", "auto"),
    ("gpt_oss", "w8", "int8"),
    ("gpt_oss", "bf16", "auto"),
    ("qwen2_moe", "f32", "auto"),
]
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
        prompts,
        max_new_tokens=7,
        return_dict=True,
        output_context_logits=True,
        output_generation_logits=True,
        end_id=-1,
    )
    parts = zip(out["context_logits"], out["generation_logits"], strict=True)
    return [b"".join(each.tobytes() for each in pair) for pair in parts]


@pytest.mark.daily(1)
@pytest.mark.native
@pytest.mark.parametrize(
    ("precision", "activations"), spanning([("f32", "auto"), ("bf16", "auto"), *QUANTISED], *values(2))
)
def test_alone_in_company_and_in_chunks(checkpoint: Path, tmp_path: Path, precision: str, activations: str) -> None:
    """Tokens that share a step take different experts; few rows and many go different ways through the kernels."""
    company_changes_nothing(checkpoint, tmp_path / "e", precision, activations)


@pytest.mark.daily(1)
@pytest.mark.native
@pytest.mark.parametrize(("family", "precision", "activations"), OTHERS)
def test_other_routers_alone_and_in_company(family: str, precision: str, activations: str, tmp_path: Path) -> None:
    """Groups, biases that select, shared experts and their gates; sinks, windows, biases and clamped gates."""
    model = write_model(tmp_path / "m", find_family(family).tiny)
    convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "c"))
    company_changes_nothing(tmp_path / "c", tmp_path / "e", precision, activations)


def company_changes_nothing(checkpoint: Path, engine: Path, precision: str, activations: str) -> None:
    """Bits of prompts alone, in batches and in chunks."""
    build(BuildConfig(precision=precision, activations=activations, max_seq_len=60), checkpoint, engine)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 61, length).tolist() for length in (1, 37, 5, 16, 18, 2, 9, 1)]
    with ModelRunner.from_dir(engine, threads=1) as runner:
        alone = list(itertools.chain.from_iterable(bits(runner, [prompt]) for prompt in prompts))
    for tokens, batch, threads in ((None, None, 2), (4, 3, 2), (17, 8, 1)):
        with ModelRunner.from_dir(engine, max_num_tokens=tokens, max_batch_size=batch, threads=threads) as runner:
            assert bits(runner, prompts) == alone


@pytest.mark.daily(1)
@pytest.mark.native
@pytest.mark.parametrize(
    ("family", "precision", "activations"),
    spanning(
        (  # each family in every other precision
            (family, *kind)
            for first, family in enumerate(["gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"])
            for kind in QUANTISED[first % 2 :: 2]
        ),
        lambda family, *kind: family,
        lambda family, *kind: kind,
    ),
)
def test_quantised_experts_follow_the_references(family: str, precision: str, activations: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", find_family(family).tiny)
    convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "c"))
    config = BuildConfig(precision=precision, activations=activations, tokens_per_block=16, kv_cache_dtype="f32")
    build(config, tmp_path / "c", tmp_path / "e")
    ids = np.random.default_rng(6).integers(0, 61, (2, 30))
    expected = engine_logits(tmp_path / "e", ids)
    with ModelRunner.from_dir(tmp_path / "e", threads=1) as runner:
        out = runner.generate(ids.tolist(), max_new_tokens=1, return_dict=True, output_context_logits=True)
    # where activations are rounded to int8 or bf16, a last bit may move one of them by a whole step
    tolerance = 5e-3 if activations != "bf16" or read_manifest(tmp_path / "e").target == "cpu/amx" else 1e-5
    assert np.abs(np.stack(out["context_logits"]) - expected).max() < tolerance * np.ptp(expected)


@pytest.mark.slow
def test_routers_keep_their_bits(checkpoint: Path, tmp_path: Path) -> None:
    """Experts, projections and head are quantised, each as asked for; no pattern fits a router."""
    rule = LayerRule(pattern="layers.2/moe_*", precision="w8", activations="bf16")
    build(BuildConfig(target="ref", precision="w4g32", layers=(rule,)), checkpoint, tmp_path / "e")
    steps = {step["name"]: step for step in inspect(tmp_path / "e").document["steps"]}
    found = {name: (steps[name]["precision"], steps[name]["activations"]) for name in steps if "moe_" in name}
    assert found["layers.0/moe_router"] == found["layers.2/moe_router"] == ("f32", "f32")
    assert found["layers.0/moe_gate_up"] == found["layers.0/moe_down"] == ("w4g32", "int8")
    assert found["layers.2/moe_gate_up"] == found["layers.2/moe_down"] == ("w8", "f32")
    assert 0 < steps["layers.0/moe_gate_up"]["int8_error"] < 0.05
    rule = LayerRule(pattern="layers.2/moe_router", precision="w8")
    with pytest.raises(UsageError, match=r"fits no matmul(.|\n)*layers.2/moe_router"):
        build(BuildConfig(target="ref", precision="w4g32", layers=(rule,)), checkpoint, tmp_path / "f")


@pytest.mark.slow
def test_gates_of_shared_experts_keep_their_bits(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", find_family("qwen2_moe").tiny)
    convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "c"))
    build(BuildConfig(target="ref", precision="w4g32"), tmp_path / "c", tmp_path / "e")
    steps = {step["name"]: step["precision"] for step in inspect(tmp_path / "e").document["steps"]}
    assert steps["layers.0/shared_gate"] == steps["layers.0/moe_router"] == "f32"
    assert steps["layers.0/gate_up"] == steps["layers.0/moe_gate_up"] == "w4g32"


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


@pytest.mark.slow
@pytest.mark.native
def test_a_build_times_experts(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache says is the fastest is shown, stored, listed by inspect, run, and gives the same bits."""
    monkeypatch.setattr(tune, "MIN_WEIGHTS", 1000)
    monkeypatch.setattr(tune, "ROUNDS", 1)
    cache = tmp_path / "cache.json"
    options = ["--precision", "w8", "--activations", "int8", "--max_seq_len", "60", "--max_num_tokens", "40"]
    args = ("build", "--checkpoint_dir", checkpoint, *options, "--output_dir")
    ingot(*args, tmp_path / "plain", "--no_autotune").succeeds()
    ingot(*args, tmp_path / "first", "--timing_cache", cache).succeeds()
    document = json.loads(cache.read_text())
    (times,) = document["machines"].values()
    keys = [key for key in times if ", 3 of 24 experts rows " in key]
    assert sorted(key.rpartition(" ")[2] for key in keys) == sorted(["1", "8", "32", "40"] * 2)
    for key in keys:
        times[key] = [0.004] * (len(times[key]) - 1) + [0.001]
    cache.write_text(json.dumps(document))
    told = ingot(*args, tmp_path / "e", "--timing_cache", cache).succeeds().err
    assert told.count("as shipped 4.000 ms, otherwise shared 4.000 ms, whole experts in turn 1.000 ms (chosen)") == 3
    assert told.count("as shipped 4.000 ms, otherwise shared 1.000 ms (chosen)") == 3
    plan = read_plan(tmp_path / "e")
    experts = {step.name: step.op for step in plan.steps if step.op in ("moe_gate_up", "moe_down")}
    assert experts
    assert all(plan.tactics[name] == ("2222" if op == "moe_gate_up" else "1111") for name, op in experts.items())
    found = inspect(tmp_path / "e")
    assert {step["name"]: step["tactics"] for step in found.document["steps"] if step["tactics"]} == plan.tactics
    assert "  2222  " in found.text
    prompts = [[5], list(range(40)), [3, 1, 4, 1, 5]]
    results = []
    for name in ("plain", "e"):
        with ModelRunner.from_dir(tmp_path / name, threads=2) as runner:
            results.append(bits(runner, prompts))
    assert results[0] == results[1]
