"""auto activations: the error is what the product loses, and a product that loses much keeps float inputs."""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import BuildReport, build
from ingot.builder.calibrate import MAX_TOKENS, sample_ids
from ingot.checkpoint import Checkpoint
from ingot.compare.packed import PackedWeights
from ingot.compare.taps import TappedRun
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.recipe import LayerRule
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import open_engine, read_manifest
from ingot.errors import NoKernelError
from ingot.plugins.quantised import round_to_int8
from ingot.plugins.ref.session import RefSession
from ingot.plugins.ref.target import RefTarget
from ingot.plugins.target import SessionOptions
from ingot.quickstart import SHIPPED
from tests import quantised
from tests.builder.engines import engine_logits
from tests.convert.quantised.test_formats import CASES
from tests.handmade import TINY_GPT2, TINY_LLAMA, random_tensors, write_model, write_safetensors

LLAMA = {**TINY_LLAMA, "num_hidden_layers": 1}


def make_checkpoint(folder: Path, config: dict[str, object] = LLAMA) -> Path:
    convert(ConvertOptions(model_dir=write_model(folder / "m", config), output_dir=folder / "c"))
    return folder / "c"


def activations(report: BuildReport) -> dict[str, object]:
    return {step.name: step.attrs["activations"] for step in report.plan.steps if step.op == "matmul"}


def test_the_first_product_by_hand(tmp_path: Path) -> None:
    """Its input is an RMS norm of rows of the table."""
    checkpoint = make_checkpoint(tmp_path)
    report = build(BuildConfig(target="ref", precision="w8"), checkpoint, tmp_path / "e")
    tensors = {
        name: bits.astype(np.float64) for name, (_, bits) in random_tensors(LLAMA).items() if bits.dtype == np.float32
    }
    x = tensors["model.embed_tokens.weight"][sample_ids(Checkpoint.open(checkpoint), 61, 64)]
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * tensors["model.layers.0.input_layernorm.weight"]
    weight = np.concatenate([tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"])
    codes, scale = round_to_int8(x.astype(np.float32))
    exact, rounded = x @ weight.T, codes.astype(np.float64) * scale[:, None] @ weight.T
    errors = ((rounded - exact) ** 2).sum(axis=1) / (exact * exact).sum(axis=1)
    measured = read_manifest(tmp_path / "e").activation_errors
    assert measured["layers.0/qkv"] == pytest.approx(np.sqrt(errors.mean()), rel=0.02)
    assert set(activations(report).values()) == {"int8"}
    assert any("int8 activations in 5 of 5 matmuls" in note for note in report.notes)


def test_an_outlier_keeps_its_product_in_float(tmp_path: Path) -> None:
    """One huge input that meets a weight of zero: all that counts is rounded away."""
    folder, tensors = write_model(tmp_path / "m", LLAMA), random_tensors(LLAMA)
    norm, gate, up = (
        tensors[f"model.layers.0.{name}.weight"][1]
        for name in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj")
    )
    norm[3], gate[:, 3], up[:, 3] = 1e4, 0, 0
    write_safetensors(folder / "model.safetensors", tensors)
    convert(ConvertOptions(model_dir=folder, output_dir=tmp_path / "c"))
    report = build(BuildConfig(target="ref", precision="w4g32"), tmp_path / "c", tmp_path / "e")
    assert activations(report) == {
        "layers.0/qkv": "int8",
        "layers.0/attention_out": "int8",
        "layers.0/gate_up": "f32",
        "layers.0/down": "int8",
        "lm_head": "int8",
    }
    assert (read_manifest(tmp_path / "e").activation_errors["layers.0/gate_up"] or 0) > 0.3
    assert any("not rounded: layers.0/gate_up" in note for note in report.notes)
    forced = build(BuildConfig(target="ref", precision="w4g32", activations="int8"), tmp_path / "c", tmp_path / "f")
    assert set(activations(forced).values()) == {"int8"}
    assert read_manifest(tmp_path / "f").activation_errors == {}


@pytest.mark.parametrize(("precision", "tolerance"), [("w8", 0.04), ("w4g32", 0.05)])
def test_products_are_rounded_up_to_the_tolerance(
    precision: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm_head is w8 in both."""
    found = {
        "layers.0/qkv": tolerance,
        "layers.0/attention_out": tolerance * 1.001,
        "layers.0/gate_up": tolerance * 0.999,
        "layers.0/down": float("nan"),
        "lm_head": 0.0401,
    }
    monkeypatch.setattr("ingot.builder.activations.SampleErrors.of", lambda self, graph: found)
    report = build(BuildConfig(target="ref", precision=precision), make_checkpoint(tmp_path), tmp_path / "e")
    assert activations(report) == {
        "layers.0/qkv": "int8",
        "layers.0/attention_out": "f32",
        "layers.0/gate_up": "int8",
        "layers.0/down": "f32",
        "lm_head": "f32",
    }
    assert read_manifest(tmp_path / "e").activation_errors["layers.0/down"] is None


def test_products_too_deep_for_sums_of_int8_keep_float_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths are 32, but 44 of down and 48 of attention_out."""
    monkeypatch.setattr("ingot.builder.activations.MAX_K", 44)
    report = build(BuildConfig(target="ref", precision="w8"), make_checkpoint(tmp_path), tmp_path / "e")
    chosen = activations(report)
    assert (chosen["layers.0/down"], chosen["layers.0/attention_out"]) == ("int8", "f32")


def test_errors_of_experts_by_hand(tmp_path: Path) -> None:
    """Of the first layer's router's input and the experts that its tokens take, as the op's reference has it."""
    config = {**find_family("mixtral").tiny, "num_hidden_layers": 1}
    checkpoint = make_checkpoint(tmp_path, config)
    build(BuildConfig(target="ref", precision="f32"), checkpoint, tmp_path / "f")
    build(BuildConfig(target="ref", precision="w8"), checkpoint, tmp_path / "e")
    ids = np.array([sample_ids(Checkpoint.open(checkpoint), 61, 64)])
    with open_engine(tmp_path / "f") as opened:
        session = RefSession(opened.plan, opened.weights, SessionOptions(num_blocks=opened.plan.in_each(8)))
        run = TappedRun(session, [opened.plan], ids.astype(np.int32))
        outputs = {step.name: own for step, (own,) in zip(opened.plan.steps, run.steps([0]), strict=True)}
        x, last = (next(iter(outputs[name].values())) for name in ("layers.0/mlp_norm", "final_norm"))
        plan, section = opened.plan, opened.weights.copy()
        step = next(step for step in plan.steps if step.name == "layers.0/moe_down")
        weight = PackedWeights(plan, opened.weights).whole(step.inputs[3])
        first = PackedWeights(plan, opened.weights).whole(f"{step.name.removesuffix('down')}gate_up.weight")
    numbers, shares = outputs["layers.0/moe_route"].values()
    (y,) = outputs["layers.0/moe_gate_up"].values()
    y = y.reshape(*numbers.shape, -1)
    measured = read_manifest(tmp_path / "e").activation_errors
    for name, inputs, matrices in (("gate_up", x[:, None].repeat(2, axis=1), first), ("down", y, weight)):
        codes, scale = round_to_int8(inputs.reshape(-1, inputs.shape[-1]))
        change = (codes * scale[:, None]).reshape(inputs.shape) - inputs
        lost, squares = (
            (np.einsum("tsk,tsnk->tsn", each, matrices[numbers.astype(int)]) ** 2).sum(axis=2)
            for each in (change, inputs)
        )
        expected = np.sqrt((lost / squares).mean())
        assert measured[f"layers.0/moe_{name}"] == pytest.approx(expected, rel=0.006), "stored in three digits"
    assert shares.shape == numbers.shape
    head, codes_of = PackedWeights(plan, section).whole("lm_head.weight"), round_to_int8(last)
    lost, squares = ((each @ head.T) ** 2 for each in (codes_of[0] * codes_of[1][:, None] - last, last))
    assert measured["lm_head"] == pytest.approx(np.sqrt((lost.sum(axis=1) / squares.sum(axis=1)).mean()), rel=0.02)


def test_options_and_rules_decide(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    report = build(BuildConfig(target="ref", precision="w8", activations="bf16"), checkpoint, tmp_path / "e")
    assert set(activations(report).values()) == {"f32"}
    rules = (LayerRule(pattern="*/down", activations="bf16"), LayerRule(pattern="lm_head", precision="bf16"))
    report = build(BuildConfig(target="ref", precision="w8", layers=rules), checkpoint, tmp_path / "e")
    chosen = activations(report)
    assert [chosen[name] for name in ("layers.0/qkv", "layers.0/down", "lm_head")] == ["int8", "f32", "f32"]
    assert set(read_manifest(tmp_path / "e").activation_errors) == {
        "layers.0/qkv",
        "layers.0/attention_out",
        "layers.0/gate_up",
    }
    kernels = {step.name: step.kernel for step in report.plan.steps}
    assert kernels["layers.0/qkv"] == "matmul.w8a8.ref"
    assert kernels["layers.0/down"] == "matmul.w8.ref"
    assert kernels["lm_head"] == "matmul.bf16.ref"


def test_a_target_with_one_mode_takes_it_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, every = make_checkpoint(tmp_path), RefTarget().kernels()
    for missing, left in (("matmul.w8a8.ref", "f32"), ("matmul.w8.ref", "int8")):
        names = tuple(name for name in every if name != missing)
        monkeypatch.setattr(RefTarget, "kernels", lambda self, names=names: names)
        report = build(BuildConfig(target="ref", precision="w8"), checkpoint, tmp_path / "e")
        assert set(activations(report).values()) == {left}
        assert any("has no kernels for anything else" in note for note in report.notes)
        other = "bf16" if left == "int8" else "int8"
        with pytest.raises(NoKernelError, match="has no kernel for op matmul"):
            build(BuildConfig(target="ref", precision="w8", activations=other), checkpoint, tmp_path / "f")


def test_experts_have_kernels_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without int8 products of experts rounds the other products all the same."""
    checkpoint, every = make_checkpoint(tmp_path, dict(find_family("mixtral").tiny)), RefTarget().kernels()
    names = tuple(name for name in every if not (name.startswith("moe_") and "a8" in name))
    monkeypatch.setattr(RefTarget, "kernels", lambda self: names)
    report = build(BuildConfig(target="ref", precision="w8"), checkpoint, tmp_path / "e")
    steps = [step for step in report.plan.steps if step.op.startswith("moe_") and "activations" in step.attrs]
    assert {step.attrs["activations"] for step in steps} == {"f32"}
    assert activations(report)["layers.0/qkv"] == "int8"
    assert any("w8 products of experts (moe_down): ref has no kernels" in note for note in report.notes)


def plan_kernels(report: BuildReport) -> dict[str, tuple[str, object]]:
    return {step.name: (step.kernel, step.attrs["activations"]) for step in report.plan.steps if step.op == "matmul"}


@pytest.mark.native
def test_f32_activations_take_kernels_that_do_not_round(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    for target, rounding in (("cpu/avx512bf16", "avx512bf16"), ("cpu/amx", "amx")):
        for asked, expected in (("auto", (f"matmul.bf16.{rounding}", "bf16")), ("f32", ("matmul.bf16.avx512", "f32"))):
            config = BuildConfig(
                target=target, precision="bf16", activations=asked, compress_weights=False, dry_run=True
            )
            report = build(config, checkpoint, tmp_path / "e")
            assert set(plan_kernels(report).values()) == {expected}
            attention = {step.kernel for step in report.plan.steps if step.op == "paged_attention"}
            assert attention == {expected[0].replace("matmul", "paged_attention")}
    config = BuildConfig(target="cpu/amx", precision="w8", activations="f32", dry_run=True)
    assert set(plan_kernels(build(config, checkpoint, tmp_path / "e")).values()) == {("matmul.w8.avx512", "f32")}


@pytest.mark.native
@pytest.mark.parametrize(
    ("target", "asked", "expected"),
    [
        ("cpu/avx512bf16", "auto", ("matmul.f8.avx512bf16", "bf16_inputs")),
        ("cpu/avx512bf16", "bf16", ("matmul.f8.avx512bf16", "bf16_inputs")),
        ("cpu/avx512bf16", "f32", ("matmul.f8.avx512", "f32")),
        ("cpu/amx", "auto", ("matmul.f8.amx", "bf16")),
        ("cpu/amx", "f32", ("matmul.f8.avx512", "f32")),
        ("cpu/avx512", "auto", ("matmul.f8.avx512", "f32")),
    ],
)
def test_inputs_of_fp8_weights(target: str, asked: str, expected: tuple[str, str], tmp_path: Path) -> None:
    settings, packer, _ = CASES["fp8 blocks of 32 columns"]
    quantised.write_model(tmp_path / "model", settings, packer)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    config = BuildConfig(target=target, activations=asked, dry_run=True)
    kernels = plan_kernels(build(config, tmp_path / "checkpoint", tmp_path / "e"))
    kernels.pop("lm_head")
    assert set(kernels.values()) == {expected}


def test_f32_activations_are_refused_where_every_kernel_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RefTarget, "activations", lambda self, kernel: "bf16")
    config = BuildConfig(target="ref", precision="bf16", activations="f32", dry_run=True)
    with pytest.raises(NoKernelError, match="no kernel for op matmul in bf16 with f32 activations"):
        build(config, make_checkpoint(tmp_path), tmp_path / "e")


def test_the_sample_is_text_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    plain = Checkpoint.open(make_checkpoint(tmp_path))
    ids = sample_ids(plain, 61, 64)
    assert len(ids) == MAX_TOKENS
    assert len(set(ids)) > 20
    assert max(ids) < 61
    assert len(sample_ids(plain, 61, 9)) == 9
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=tmp_path / "s"))
    shipped = Checkpoint.open(tmp_path / "s")
    text = sample_ids(shipped, 100_000, 1000)
    assert text[0] == 1, "the model's first token"
    assert len(text) == MAX_TOKENS
    assert max(sample_ids(shipped, 300, 1000)) < 300
    (tmp_path / "s/tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}})
    )
    assert sample_ids(shipped, 61, 64) == ids


@pytest.mark.daily(1)
@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(("precision", "most"), [("w8", 0.02), ("w4g32", 0.2), ("w4g128", 0.25)])
def test_quantised_engines_stay_near(config: dict[str, object], precision: str, most: float, tmp_path: Path) -> None:
    """Tied tables, biases, learned positions, gated and plain MLPs; K = 172 and 44, N of every kind."""
    checkpoint = make_checkpoint(tmp_path, {**config, "intermediate_size": 172})
    ids = np.random.default_rng(2).integers(0, 61, (2, 13))
    for name in ("f32", precision):
        build(BuildConfig(target="ref", precision=name), checkpoint, tmp_path / name)
    exact, found = (engine_logits(tmp_path / name, ids) for name in ("f32", precision))
    error = np.sqrt(((found - exact) ** 2).mean()) / exact.std()
    assert 1e-4 < error < most
    plan_dtypes = {DType.W8, DType.F32} if precision == "w8" else {DType.W8, DType.W4, DType.F32}
    report = build(BuildConfig(target="ref", precision=precision, dry_run=True), checkpoint, tmp_path / "d")
    assert {weight.dtype for weight in report.plan.weights} == plan_dtypes
