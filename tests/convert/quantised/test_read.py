"""What is refused of quantised checkpoints: formats by name, and files that do not fit their configuration."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.read import Section
from ingot.convert.convert import convert
from ingot.convert.quantised.patterns import is_named, matches
from ingot.convert.quantised.read import REFUSED, find_formats, read_quantised
from ingot.dtypes import DType
from ingot.engine import read_manifest
from ingot.errors import CheckpointError, ConfigError, IngotError, UnsupportedModelError
from ingot.inspect import inspect
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.convert.quantised.test_formats import product_weights
from tests.graph_logits import logits_of_graph

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
BITNET = {"quant_method": "bitnet"}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "a": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
Q = "model.layers.0.self_attn.q_proj"


def written(
    folder: Path, settings: dict[str, Any], packer: write.Packer, change: Callable[[write.Tensors], None]
) -> Path:
    """A model directory whose q_proj alone is quantised, its tensors changed before they are written."""
    rng = np.random.default_rng(0)
    tensors, _ = packer(rng, *write.PRODUCTS["self_attn.q_proj"])
    named = {f"{Q}.{part}": each for part, each in tensors.items()}
    for name, shape in write.PRODUCTS.items():
        if not Q.endswith(name):
            named[f"model.layers.0.{name}.weight"] = (DType.F32, rng.standard_normal(shape).astype(np.float32))
    vector = (DType.F32, np.ones(write.HIDDEN, np.float32))
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        named[f"{name}.weight"] = vector
    for name in ("model.embed_tokens", "lm_head"):
        named[f"{name}.weight"] = (DType.F32, np.ones((write.VOCAB, write.HIDDEN), np.float32))
    change(named)
    write.save(folder, {**write.CONFIG, "attention_bias": False, "quantization_config": settings}, named)
    return folder


def without(part: str) -> Callable[[write.Tensors], None]:
    return lambda tensors: tensors.pop(f"{Q}.{part}") and None


def changed(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[write.Tensors], None]:
    def apply(tensors: write.Tensors) -> None:
        dtype, bits = tensors[f"{Q}.{part}"]
        tensors[f"{Q}.{part}"] = (dtype, change(bits.copy()))

    return apply


def nan_in(bits: np.ndarray) -> np.ndarray:
    bits.reshape(-1)[3] = np.nan
    return bits


def as_they_are(tensors: write.Tensors) -> None:
    """No change."""


@pytest.mark.daily(30)
@pytest.mark.parametrize(
    ("settings", "packer", "change", "words"),
    [
        (GPTQ, write.gptq(4, 32), without("scales"), f"lacks its scales(.|\n)*{Q}"),
        (GPTQ, write.gptq(4, 32), without("qzeros"), f"lacks its qzeros(.|\n)*{Q}"),
        (GPTQ, write.gptq(4, 32), changed("scales", nan_in), f"scales that are NaN(.|\n)*{Q}.scales(.|\n)*1 of 128"),
        (GPTQ, write.gptq(4, 32), changed("scales", lambda x: x[:1]), f"does not fit(.|\n)*{Q}.(scales|qzeros)"),
        (GPTQ, write.gptq(4, 32), changed("qzeros", lambda x: x[:, :3]), f"does not fit(.|\n)*{Q}.qzeros"),
        (GPTQ, write.gptq(4, 32), changed("qweight", lambda x: x[:4]), f"does not fit(.|\n)*{Q}.scales"),
        (GPTQ, write.gptq(8, 32), as_they_are, f"does not fit(.|\n)*{Q}.qzeros"),
        ({**GPTQ, "group_size": 16}, write.gptq(4, 32), as_they_are, f"does not fit(.|\n)*{Q}.scales"),
        ({**GPTQ, "sym": True}, write.gptq(4, 32), as_they_are, f"calls symmetric(.|\n)*{Q}.qzeros"),
        (
            GPTQ,
            write.gptq(4, 32, shuffled=True),
            changed("g_idx", lambda x: np.where(x == 1, 0, x)),
            f"groups(.|\n)*other sizes(.|\n)*{Q}.g_idx",
        ),
        ({**GPTQ, "bits": 5}, write.gptq(4, 32), as_they_are, "this number of bits(.|\n)*bits(.|\n)*2, 3, 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, write.gptq(4, 32), as_they_are, "not supported(.|\n)*marlin"),
        ({**GPTQ, "checkpoint_format": "gptq_p"}, write.gptq(4, 32), as_they_are, "not supported(.|\n)*gptq_p"),
        ({**GPTQ, "dynamic": {"-:.*q_proj": {}}}, write.gptq(4, 32), as_they_are, f"leaves a module out(.|\n)*{Q}"),
        ({**GPTQ, "dynamic": {"(": {}}}, write.gptq(4, 32), as_they_are, "not a regular expression"),
        ({**GPTQ, "dynamic": 3}, write.gptq(4, 32), as_they_are, "dynamic(.|\n)*an object"),
        (
            GPTQ,
            write.gptq(4, 32),
            lambda tensors: tensors.update({"model.layers.0.extra.scales": (DType.F32, np.ones(3, np.float32))}),
            "does not ask for: model.layers.0.extra.scales",
        ),
        (
            NVFP4,
            write.fp4("weight", 16, factor="weight_scale_2"),
            without("weight_scale_2"),
            "lacks its weight_scale_2",
        ),
        (
            NVFP4,
            write.fp4("weight", 16, factor="weight_scale_2"),
            changed("weight_scale", lambda x: x[:, :2]),
            "weight_scale(.|\n)*does not fit",
        ),
        (
            NVFP4,
            write.fp4("weight", 16, factor="weight_scale_2"),
            changed("weight_scale_2", lambda x: x * np.nan),
            "zero, NaN or infinite(.|\n)*nan",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            write.bytes_with_scale(DType.F8, "weight_scale_inv", (32, 32)),
            without("weight_scale_inv"),
            f"lacks its scales(.|\n)*{Q}",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [32, 16]},
            write.bytes_with_scale(DType.F8, "weight_scale_inv", (32, 32)),
            as_they_are,
            f"does not fit(.|\n)*{Q}.weight_scale_inv(.|\n)*2, 4",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [1 << 60, 1 << 60]},
            write.bytes_with_scale(DType.F8, "weight_scale_inv", (32, 32)),
            as_they_are,
            "does not fit(.|\n)*1, 1",
        ),
        (CT, write.packed(4, 32), changed("weight_shape", lambda x: x * 1_000_000_000), "weight_shape(.|\n)*64 rows"),
        (CT, write.packed(4, 32), changed("weight_packed", lambda x: x[:, :3]), "does not fit(.|\n)*weight_packed"),
        ({**CT, "ignore": ["re:.*q_proj$"]}, write.packed(4, 32), as_they_are, f"leaves a module out(.|\n)*{Q}"),
        ({**CT, "format": "marlin-24"}, write.packed(4, 32), as_they_are, "not supported(.|\n)*marlin-24"),
        (
            {**CT, "sparsity_config": {"format": "sparse-24-bitmask"}},
            write.packed(4, 32),
            as_they_are,
            "sparse weights(.|\n)*sparse-24",
        ),
        (
            {**CT, "transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
            write.packed(4, 32),
            as_they_are,
            r"rotated inputs(.|\n)*apply\[0\].location",
        ),
        (
            CT,
            write.packed(4, 32),
            lambda tensors: tensors.update({f"{Q}.weight_global_scale": (DType.F32, np.ones(1, np.float32))}),
            f"do not have(.|\n)*{Q}(.|\n)*got: weight_global_scale",
        ),
        (
            {"load_in_4bit": True},
            write.bnb4(64),
            changed("weight.quant_state.bitsandbytes__nf4", lambda x: x[:20]),
            "not valid JSON(.|\n)*quant_state",
        ),
        (
            {"load_in_4bit": True},
            write.bnb4(64),
            changed("weight", lambda x: x[:-8]),
            "another size(.|\n)*q_proj.weight",
        ),
        ({"quant_method": "awq", "version": "gemv"}, write.awq(32), as_they_are, "of this version(.|\n)*gemv"),
        ({"quant_method": "hqq"}, write.hqq(4, 64, 1), changed("shape", lambda x: x * 7), "do not fit its shape"),
        ({"quant_method": "torchao"}, write.torchao(32), without("_weight_scale"), "lacks its _weight_scale"),
        (
            {"quant_method": "bitnet", "quantization_mode": "online"},
            write.as_floats,
            as_they_are,
            "variant of BitNet(.|\n)*quantization_mode online",
        ),
        (
            {**BITNET, "linear_class": "autobitlinear"},
            write.bitnet(divides=False),
            lambda tensors: tensors.update({f"{Q}.bias": (DType.F32, np.ones(write.HIDDEN, np.float32))}),
            "bias beside BitNet(.|\n)*q_proj.bias",
        ),
        ({**BITNET, "use_rms_norm": True}, write.bitnet(divides=True), as_they_are, "use_rms_norm True"),
        (BITNET, write.bitnet(divides=True), changed("weight_scale", lambda x: 0 * x), "zero, NaN or infinite"),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, settings: dict[str, Any], packer: write.Packer, change: Callable[[write.Tensors], None], words: str
) -> None:
    model = written(tmp_path / "model", settings, packer, change)
    with pytest.raises((CheckpointError, ConfigError, UnsupportedModelError), match=words):
        convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("name", [*REFUSED, "exl2-new", "nonsense", ""])
def test_formats_that_are_not_read(tmp_path: Path, name: str) -> None:
    config = Section({"quantization_config": {"quant_method": name, "bits": 4}}, "config.json")
    with pytest.raises(UnsupportedModelError, match="not supported") as caught:
        read_quantised(config, tmp_path, {})
    assert caught.value.where == "config.json:quantization_config.quant_method"
    assert REFUSED.get(name, "") in str(caught.value)


def test_random_weights_are_not_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**write.CONFIG, "quantization_config": GPTQ}))
    options = ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / "checkpoint")
    with pytest.raises(IngotError, match=r"--random_weights(.|\n)*quantization_config"):
        convert(options)


def test_modules_that_are_left_out() -> None:
    assert is_named("model.layers.0.mlp.gate", ["mlp.gate"])
    assert not is_named("model.layers.0.mlp.gate_proj", ["mlp.gate"])
    assert is_named("model.layers.3.mlp.up_proj", ["re:.*up_proj"])
    assert is_named("model.layers.3.mlp.up_proj", ["model.layers.3.*"])
    assert not is_named("lm_head", [])


def test_every_format_has_a_name_of_its_own() -> None:
    assert len(find_formats()) > 10
    assert not set(find_formats()) & set(REFUSED)


def test_config_of_modelopt_beside_the_model(tmp_path: Path) -> None:
    packer = write.bytes_with_scale(DType.F8, "weight_scale", None)
    weights = write.write_model(tmp_path / "model", {}, packer)
    document = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(document))
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    config = Checkpoint.open(tmp_path / "checkpoint").config
    assert "hf_quant_config.json" in config.sources
    assert set(config.quantised.values()) == {"modelopt f8"}
    assert len(weights) == 16


@pytest.mark.parametrize(
    ("name", "settings", "packer", "kind"),
    [
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "sym": False},
            write.gptq(4, 32),
            "gptq u4g32 with zero",
        ),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 32, "version": "GEMM"},
            write.awq(32),
            "awq u4g32 with zero",
        ),
    ],
)
def test_old_files_beside_the_model(
    tmp_path: Path, name: str, settings: dict[str, object], packer: write.Packer, kind: str
) -> None:
    weights = write.write_model(tmp_path / "model", {}, packer)
    (tmp_path / "model" / name).write_text(json.dumps(settings))
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    config = Checkpoint.open(tmp_path / "checkpoint").config
    assert name in config.sources
    assert set(config.quantised.values()) == {kind}
    for product, got in zip(write.PRODUCTS, product_weights(tmp_path / "checkpoint"), strict=False):
        np.testing.assert_array_equal(got, weights[f"model.layers.0.{product}.weight"])


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("settings", "packer"),
    [
        ({**GPTQ, "sym": False}, write.gptq(4, 32)),
        ({**GPTQ, "bits": 3, "sym": True}, write.gptq(3, 32, symmetric=True)),
        (NVFP4, write.fp4("weight", 16, factor="weight_scale_2")),
        ({**GPTQ, "sym": False, "desc_act": True}, write.gptq(4, 32, shuffled=True)),
    ],
    ids=["gptq", "gptq 3 bits", "nvfp4", "columns in an order of each expert"],
)
def test_experts_are_stacked(tmp_path: Path, settings: dict[str, Any], packer: write.Packer) -> None:
    """gate and up of every expert become one weight, each with scales of its own."""
    experts = {f"block_sparse_moe.experts.{e}.{w}": shape for e in range(3) for w, shape in SHAPES.items()}
    config = {"model_type": "mixtral", "attention_bias": False, "sliding_window": None}
    config |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    attention = {name: shape for name, shape in write.PRODUCTS.items() if "self_attn" in name}
    for name, given in (("model", settings), ("float", None)):
        products = {**attention, **experts}
        write.write_model(tmp_path / name, given, packer, config=config, products=products)
        add_router(tmp_path / name)
        convert(ConvertOptions(model_dir=tmp_path / name, output_dir=tmp_path / f"{name}.checkpoint"))
    ids = np.random.default_rng(3).integers(0, write.VOCAB, (1, 9))
    expected = logits_of_graph(tmp_path / "float.checkpoint", ids)
    bound = 1e-5 * np.ptp(expected)
    np.testing.assert_allclose(logits_of_graph(tmp_path / "model.checkpoint", ids), expected, rtol=0, atol=bound)
    build(BuildConfig(target="ref", precision="f32"), tmp_path / "model.checkpoint", tmp_path / "engine")
    np.testing.assert_allclose(engine_logits(tmp_path / "engine", ids), expected, rtol=0, atol=bound)
    report = build(BuildConfig(target="ref"), tmp_path / "model.checkpoint", tmp_path / "auto")
    lost = [note for note in report.notes if note.startswith("codes of ")]
    if settings.get("desc_act"):
        reason = "stored as w8, because its experts have orders of columns of their own (desc_act)"
        (line,) = lost
        assert line.startswith("codes of layers.0/")
        assert line.endswith(reason + ", and read the same inputs")
        assert line.removeprefix("codes of ") in inspect(tmp_path / "auto").summary
        assert any(reason in each for each in read_manifest(tmp_path / "auto").lost_codes.values())
    else:
        assert lost == []


SHAPES = {"w1": (write.INNER, write.HIDDEN), "w3": (write.INNER, write.HIDDEN), "w2": (write.HIDDEN, write.INNER)}


def add_router(folder: Path) -> None:
    """A second file with the router's weight, and the index of both."""
    name = "model.layers.0.block_sparse_moe.gate.weight"
    router = np.random.default_rng(5).standard_normal((3, write.HIDDEN)).astype(np.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    write.save(folder, config, {name: (DType.F32, router)})
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    names = dict.fromkeys(write.names(folder / "model-1.safetensors"), "model-1.safetensors")
    index = {"weight_map": {**names, name: "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("precision", ["f32", "w8"])
def test_a_fused_product_of_quantised_and_float_members(tmp_path: Path, precision: str) -> None:
    """q of 4 bits beside k and v of float32: one product in the engine."""
    model = written(tmp_path / "model", GPTQ, write.gptq(4, 32, shuffled=True), as_they_are)
    convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "checkpoint"))
    report = build(BuildConfig(target="ref", precision=precision), tmp_path / "checkpoint", tmp_path / "engine")
    assert sum("qkv" in step.name for step in report.plan.steps) == 1
    if precision == "f32":
        ids = np.random.default_rng(3).integers(0, write.VOCAB, (1, 9))
        expected = logits_of_graph(tmp_path / "checkpoint", ids)
        np.testing.assert_allclose(engine_logits(tmp_path / "engine", ids), expected, rtol=0, atol=1e-4)


HANG = "model." + "a" * 58


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        r"model\.(a|a)*$",
        r"model\.(?:a|aa){30}$",
        "((a?)b*)*",
        r"model\." + "a?" * 40 + "b",
        r"model\." + "(?:a|a)" * 30 + "b",
        ".*" * 12 + "b",
        "(?=(a+)+$)x",
        "[]a](?P<n>a*a*)*",
        "(?x)#[\n(a+)+$",
        "a" * 3000,
        "(" * 900 + "a" + ")" * 900 + "*" + "a*" * 90,
    ],
)
def test_a_pattern_that_may_hang_is_refused(pattern: str) -> None:
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=r"may take too long|not a regular expression"):
        matches(pattern, HANG)
    assert time.perf_counter() - began < 5
    with pytest.raises(ConfigError, match="may take too long"):
        matches(".*a", "a" * 3000)


def test_patterns_that_models_have() -> None:
    name = "model.language_model.layers.31.mlp.experts.127.gate_up_proj"
    layers = "|".join(map(str, range(80)))
    for pattern in (
        r".*\.mlp\..*experts.*",
        rf"model\.language_model\.layers\.({layers})\.(self_attn|mlp)\..*(gate|up|down|gate_up)_proj$",
        r"^(?!.*lm_head).*\.[0-9]+\.(?:mlp|self_attn)\.experts\.\d{1,3}\.gate_(?:up)??_?proj(\.weight)?$",
        r"[^]x]+\.layers\.3[0-9]\..{2,}",
        "model.{0}.*x?{",
    ):
        assert matches(pattern, name) == (re.match(pattern, name) is not None)
