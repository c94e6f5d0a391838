"""Every format, with its traps, against the numpy formula: the weights bit for bit, onnxruntime's and ref's logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.builder.build import build
from ingot.builder.expressions import WeightReader, matrix_shape
from ingot.builder.graph import Graph, is_op, is_weight
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType
from ingot.engine import read_manifest
from ingot.inspect import inspect
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.graph_logits import logits_of_graph

GPTQ = {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
INT8 = DType.I8


def compressed(form: str, **weights: Any) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "format": form}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def fp8(form: str, strategy: str, **more: Any) -> dict[str, object]:
    return compressed(form, num_bits=8, type="float", strategy=strategy, **more)


# what → (quantization_config, packer, whether float32 may round twice)
CASES: dict[str, tuple[dict[str, object], write.Packer, bool]] = {
    "awq g32": ({**AWQ, "group_size": 32}, write.awq(32), False),
    "awq rows, without zero points": (
        {**AWQ, "group_size": -1, "zero_point": False},
        write.awq(-1, zeros=False),
        False,
    ),
    "gptq v1 asymmetric, desc_act": (
        {**GPTQ, "bits": 4, "group_size": 32, "sym": False},
        write.gptq(4, 32, shuffled=True),
        False,
    ),
    "gptq v2, ragged groups, bf16": (
        {**GPTQ, "bits": 4, "group_size": 40, "checkpoint_format": "gptq_v2"},
        write.gptq(4, 40, less=0, dtype=DType.BF16),
        False,
    ),
    "gptq symmetric v2 that says v1": (
        {**GPTQ, "bits": 4, "group_size": 32, "sym": True},
        write.gptq(4, 32, symmetric=True, less=0),
        False,
    ),
    "gptq 2 bits": ({**GPTQ, "bits": 2, "group_size": 16, "sym": False}, write.gptq(2, 16), False),
    "gptq 3 bits": ({**GPTQ, "bits": 3, "group_size": 32, "sym": True}, write.gptq(3, 32, symmetric=True), False),
    "gptq 3 bits, ragged groups": (
        {**GPTQ, "bits": 3, "group_size": 40, "sym": True},
        write.gptq(3, 40, symmetric=True),
        False,
    ),
    "gptq 8 bits": ({**GPTQ, "bits": 8, "group_size": -1, "sym": False}, write.gptq(8, -1), False),
    "gptq, bits by module": (
        {**GPTQ, "bits": 4, "group_size": 64, "sym": True, "dynamic": {"+:.*": {"bits": 8, "group_size": 32}}},
        write.gptq(8, 32, symmetric=True),
        False,
    ),
    "auto-round as gptq": ({**ROUND, "packing_format": "auto_round:auto_gptq"}, write.gptq(4, 32), False),
    "auto-round, zero points as they are": (
        {**ROUND, "packing_format": "auto_round"},
        write.gptq(4, 32, less=0),
        False,
    ),
    "auto-round 2 bits, symmetric": (
        {**ROUND, "packing_format": "auto_round:auto_gptq", "bits": 2, "sym": True},
        write.gptq(2, 32, symmetric=True),
        False,
    ),
    "auto-round as awq": ({**ROUND, "packing_format": "auto_round:auto_awq"}, write.awq(32), False),
    "ct 4 bits, ragged groups": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=40),
        write.packed(4, 40),
        False,
    ),
    "ct 4 bits asymmetric, actorder": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        write.packed(4, 32, symmetric=False, shuffled=True),
        False,
    ),
    "ct 3 bits": (compressed("pack-quantized", num_bits=3, strategy="channel"), write.packed(3, -1), False),
    "ct 3 bits, whole fields in words": (
        compressed("pack-quantized", num_bits=3, strategy="group", group_size=32, symmetric=False),
        write.packed(3, 32, symmetric=False, dense=False),
        False,
    ),
    "ct 8 bits": (compressed("pack-quantized", num_bits=8, strategy="channel"), write.packed(8, -1), False),
    "ct int8": (
        compressed("int-quantized", num_bits=8, strategy="channel"),
        write.bytes_with_scale(INT8, "weight_scale", (1, 0)),
        False,
    ),
    "ct int8 asymmetric, actorder": (
        compressed("int-quantized", num_bits=8, strategy="group", group_size=32, symmetric=False),
        write.int8_groups(32),
        False,
    ),
    "ct fp8 tensor": (
        fp8("float-quantized", "tensor"),
        write.bytes_with_scale(DType.F8, "weight_scale", None, flat=True),
        False,
    ),
    "ct fp8 blocks": (
        fp8("float-quantized", "block", block_structure=[40, 20]),
        write.bytes_with_scale(DType.F8, "weight_scale", (40, 20), dtype=DType.BF16),
        False,
    ),
    "ct nvfp4": (
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
        write.fp4("weight_packed", 16, factor="weight_global_scale", divides=True),
        False,
    ),
    "ct mxfp4": (
        compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
        write.fp4("weight_packed", 32),
        False,
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 40]},
        write.bytes_with_scale(DType.F8, "weight_scale_inv", (48, 40)),
        False,
    ),
    "fp8 blocks of 32 columns": (
        {"quant_method": "fp8", "weight_block_size": [40, 32]},
        write.bytes_with_scale(DType.F8, "weight_scale_inv", (40, 32)),
        False,
    ),
    "fp8 rows": ({"quant_method": "fbgemm_fp8"}, write.bytes_with_scale(DType.F8, "weight_scale", (1, 0)), False),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        write.bytes_with_scale(DType.F8, "weight_scale", None, flat=True),
        False,
    ),
    "modelopt nvfp4 that says fp8": (
        {"quant_method": "fp8", "quant_algo": "NVFP4"},
        write.fp4("weight", 16, factor="weight_scale_2"),
        False,
    ),
    "modelopt int4": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 16},
        write.modelopt_int4(16),
        True,
    ),
    "modelopt nvfp4 with factors of columns": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "group_size": 16},
        write.with_columns(write.fp4("weight", 16, factor="weight_scale_2")),
        True,
    ),
    "modelopt fp8 with factors of columns": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        write.with_columns(write.bytes_with_scale(DType.F8, "weight_scale", None, flat=True)),
        True,
    ),
    "bnb nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, write.bnb4(64), False),
    "bnb fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, write.bnb4(64, kind="fp4"), False),
    "bnb nf4, blocks across rows, nested": ({"load_in_4bit": True}, write.bnb4(20, nested=True), False),
    "bnb int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, write.bnb8, True),
    "hqq 4 bits": ({"quant_method": "hqq"}, write.hqq(4, 64, 1), True),
    "hqq 3 bits": ({"quant_method": "hqq"}, write.hqq(3, 32, 1), True),
    "hqq 2 bits along axis 0": ({"quant_method": "hqq"}, write.hqq(2, 16, 0), True),
    "bitnet": ({"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}, write.bitnet(divides=True), False),
    "torchao int4": ({"quant_method": "torchao"}, write.torchao(32), False),
    "torchao fp8": (
        {"quant_method": "torchao"},
        write.bytes_with_scale(DType.F8, "_weight_scale", (1, 0), name="_weight_qdata"),
        False,
    ),
}
IDS = np.random.default_rng(3).integers(0, write.VOCAB, (2, 19))


def product_weights(checkpoint: Path) -> list[np.ndarray]:
    """What the builder makes of the weights [N, K] of all products, in the order of the graph."""
    opened = Checkpoint.open(checkpoint)
    graph = Graph.load(opened.graph_path)
    found = []
    with WeightReader(opened) as reader:
        for node in graph.nodes:
            if is_op(node, "MatMul") and is_weight(node.inputs[1]):
                weight = node.inputs[1].inputs[0].inputs[0]
                rows = matrix_shape(weight)[0]
                halves = [reader.read_rows(weight, 0, 5), reader.read_rows(weight, 5, rows)]
                found.append(np.concatenate(halves))
    return found


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", CASES)
def test_a_format(tmp_path: Path, name: str) -> None:
    settings, packer, rounds_twice = CASES[name]
    weights = write.write_model(tmp_path / "model", settings, packer)
    write.write_model(tmp_path / "float", None, packer)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    convert(ConvertOptions(model_dir=tmp_path / "float", output_dir=tmp_path / "expected"))
    made = product_weights(tmp_path / "checkpoint")
    wanted = [weights[f"model.layers.0.{product}.weight"] for product in write.PRODUCTS]
    for got, expected in zip(made, [*wanted, weights["lm_head.weight"]], strict=True):
        if rounds_twice:
            np.testing.assert_allclose(got, expected, rtol=2.0**-22, atol=0)
        else:
            np.testing.assert_array_equal(got, expected)
    expected = logits_of_graph(tmp_path / "expected", IDS)
    np.testing.assert_allclose(
        logits_of_graph(tmp_path / "checkpoint", IDS), expected, rtol=0, atol=1e-5 * np.ptp(expected)
    )
    build(BuildConfig(target="ref", precision="f32"), tmp_path / "checkpoint", tmp_path / "engine")
    np.testing.assert_allclose(engine_logits(tmp_path / "engine", IDS), expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_scales_of_bitnet_that_multiply(tmp_path: Path) -> None:
    """transformers has them in layers without biases."""
    settings = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    config = {"attention_bias": False}
    weights = write.write_model(tmp_path / "model", settings, write.bitnet(divides=False), config=config)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    for product, got in zip(write.PRODUCTS, product_weights(tmp_path / "checkpoint"), strict=False):
        np.testing.assert_array_equal(got, weights[f"model.layers.0.{product}.weight"])


@pytest.mark.parametrize("bits", [3, 5])
@pytest.mark.parametrize("dense", [True, False])
def test_rows_of_as_many_words_in_both_packings(tmp_path: Path, bits: int, *, dense: bool) -> None:
    """Words of whole fields, or a dense stream: the bits that only one of them leaves empty tell them apart."""
    size = 24
    shape = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": 2, "num_key_value_heads": 2}
    settings = compressed("pack-quantized", num_bits=bits, strategy="group", group_size=8, symmetric=False)
    packer = write.packed(bits, 8, symmetric=False, dense=dense)
    products = dict.fromkeys(write.PRODUCTS, (size, size))
    config = {**shape, "head_dim": size // 2}
    weights = write.write_model(tmp_path / "model", settings, packer, config=config, products=products)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    for product, got in zip(write.PRODUCTS, product_weights(tmp_path / "checkpoint"), strict=False):
        np.testing.assert_array_equal(got, weights[f"model.layers.0.{product}.weight"])


def test_inspect_says_where_an_engine_came_from(tmp_path: Path) -> None:
    settings, packer, _ = CASES["awq g32"]
    write.write_model(tmp_path / "model", settings, packer)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    assert "quantised   awq u4g32 with zero: 7 weights" in inspect(tmp_path / "checkpoint").text
    report = build(BuildConfig(target="ref"), tmp_path / "checkpoint", tmp_path / "engine")
    assert report.precision == "w4tsg32"
    assert "chose --precision w4tsg32: the checkpoint is quantised; 4 of 5 matmuls keep their codes" in report.notes
    assert "quantised_source awq u4g32 with zero" in inspect(tmp_path / "engine").text


@pytest.mark.parametrize("precision", ["bf16", "w8", "w4g32"])
def test_a_precision_is_made_from_the_values(tmp_path: Path, precision: str) -> None:
    """The same engine bytes as from the float32 weights that are meant, also of products that are merged."""
    settings, packer, _ = CASES["gptq v1 asymmetric, desc_act"]
    write.write_model(tmp_path / "model", settings, packer)
    write.write_model(tmp_path / "float", None, packer)
    engines = []
    for name in ("model", "float"):
        convert(ConvertOptions(model_dir=tmp_path / name, output_dir=tmp_path / f"{name}.checkpoint"))
        config = BuildConfig(target="ref", precision=precision)
        build(config, tmp_path / f"{name}.checkpoint", tmp_path / f"{name}.engine")
        engines.append((tmp_path / f"{name}.engine" / "rank0.engine").read_bytes())
    assert engines[0] == engines[1]


@pytest.mark.slow  # 28 of them; each format is tried above, as ingot reads what the tests write
@pytest.mark.shared
def test_checkpoints_that_other_programs_wrote(shared: Path, tmp_path: Path) -> None:
    """Each one's logits, as transformers has them with the weights that are meant."""
    seen = 0
    for folder in sorted((shared / "models" / "quantised").glob("*")):
        if not (folder / "logits.safetensors").is_file() or (folder / "model.gguf").is_file():
            continue
        convert(ConvertOptions(model_dir=folder, output_dir=tmp_path / folder.name))
        ids, expected = reference(folder / "logits.safetensors")
        build(BuildConfig(target="ref", precision="f32"), tmp_path / folder.name, tmp_path / "engines" / folder.name)
        for got in (
            logits_of_graph(tmp_path / folder.name, ids),
            engine_logits(tmp_path / "engines" / folder.name, ids),
        ):
            assert np.abs(got - expected).max() < 1e-4, folder.name
        auto = tmp_path / "auto" / folder.name
        build(BuildConfig(target="ref", activations="bf16", kv_cache_dtype="f32"), tmp_path / folder.name, auto)
        stated = max(read_manifest(auto).weight_errors.values())
        error = np.sqrt(np.square(engine_logits(auto, ids) - expected).mean()) / expected.std()
        assert error < 4 * stated, folder.name  # of the one weight that lost most, in a stack of products
        seen += 1
    assert seen == 28


def reference(file: Path) -> tuple[np.ndarray, np.ndarray]:
    found = load_file(file)
    ids = found["input_ids"].reshape(1, -1).astype(np.int64)
    return ids, found["logits"].reshape(1, ids.shape[1], -1)
