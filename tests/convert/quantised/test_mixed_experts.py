"""Experts of which a configuration quantises only some weights, or which it quantises in forms that have none in
common."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from ingot.builder.build import build
from ingot.builder.expressions import WeightReader, matrix_shape
from ingot.builder.graph import Graph, is_op, is_weight, weight_shape
from ingot.builder.kept_rows import kept_bytes
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType, from_float32, to_float32
from ingot.engine import read_manifest
from ingot.inspect import inspect
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.graph_logits import logits_of_graph
from tests.quantised_experts import Sizes, write_experts

SIZES = Sizes(hidden=64, inner=32, shared=32, experts=3, slots=2, layers=1)
EXPERTS = [f"mlp.experts.{number}" for number in range(SIZES.experts)]
UPS = [f"{each}.up_proj" for each in (*EXPERTS, "mlp.shared_expert")]
IDS = np.random.default_rng(3).integers(0, write.VOCAB, (1, 9))


def settings(ignored: list[str], *groups: dict[str, Any]) -> dict[str, Any]:
    """Of compressed-tensors."""
    named = {f"group_{number}": each for number, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head", *ignored], "config_groups": named}


def group(form: str, targets: str, **weights: Any) -> dict[str, Any]:
    return {"format": form, "targets": [targets], "weights": {"type": "int", "symmetric": True, **weights}}


def in_bf16(rng: np.random.Generator, n: int, k: int) -> tuple[write.Tensors, write.Array]:
    """Of a product that is not quantised."""
    stored = from_float32((rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32), DType.BF16)
    return {"weight": (DType.BF16, stored)}, to_float32(stored, DType.BF16)


FOUR_BITS = {"num_bits": 4, "strategy": "group", "group_size": 32}
INT8 = write.bytes_with_scale(DType.I8, "weight_scale", (1, 0))
FP8 = write.bytes_with_scale(DType.F8, "weight_scale", (1, 0))
# what → (quantization_config, packer, packers of some products, matmul → why its codes are lost)
CASES: dict[str, tuple[dict[str, Any], write.Packer, dict[str, write.Packer], dict[str, str]]] = {
    "ups are floats": (
        settings(["re:.*up_proj$"], group("pack-quantized", "Linear", **FOUR_BITS)),
        write.packed(4, 32),
        dict.fromkeys(UPS, in_bf16),
        {"layers.0/moe_gate_up": "others of its rows are floats in the checkpoint"},
    ),
    "an expert is floats": (
        settings(["re:.*experts.1.*"], group("pack-quantized", "Linear", **FOUR_BITS)),
        write.packed(4, 32),
        {f"{EXPERTS[1]}.{each}_proj": write.as_floats for each in ("gate", "up", "down")},
        dict.fromkeys(["layers.0/moe_gate_up", "layers.0/moe_down"], "others of its rows are floats in the checkpoint"),
    ),
    "bytes beside floats": (
        settings(["re:.*up_proj$"], group("int-quantized", "Linear", num_bits=8, strategy="channel")),
        INT8,
        dict.fromkeys(UPS, in_bf16),
        {},
    ),
    "FP8 beside four bits": (
        settings(
            [],
            group("float-quantized", "re:.*up_proj$", num_bits=8, type="float", strategy="channel"),
            group("pack-quantized", "Linear", **FOUR_BITS),
        ),
        write.packed(4, 32),
        dict.fromkeys(UPS, FP8),
        {"layers.0/moe_gate_up": "its rows have codes of several kinds"},
    ),
}


def stacks(checkpoint: Checkpoint) -> list[gs.Tensor]:
    """The weights of experts, in the order of the graph."""
    products = [node for node in Graph.load(checkpoint.graph_path).nodes if is_op(node, "MatMul")]
    weights = [node.inputs[1] for node in products if is_weight(node.inputs[1])]
    return [each.inputs[0].inputs[0] for each in weights if len(weight_shape(each)) == 3]


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_unquantised_stays_so(tmp_path: Path, name: str) -> None:
    quantisation, packer, others, lost = CASES[name]
    weights = write_experts(tmp_path / "model", quantisation, packer, SIZES, others)
    write_experts(tmp_path / "float", None, packer, SIZES, others)
    for each in ("model", "float"):
        convert(ConvertOptions(model_dir=tmp_path / each, output_dir=tmp_path / f"{each}.checkpoint"))
    checkpoint = Checkpoint.open(tmp_path / "model.checkpoint")
    with WeightReader(checkpoint) as reader:
        for parts, stack in zip((("gate", "up"), ("down",)), stacks(checkpoint), strict=True):
            names = [f"model.layers.0.{each}.{part}_proj.weight" for each in EXPERTS for part in parts]
            made = reader.read_rows(stack, 0, matrix_shape(stack)[0])
            np.testing.assert_array_equal(made, np.concatenate([weights[each] for each in names]))
    expected = logits_of_graph(tmp_path / "float.checkpoint", IDS)
    bound = 1e-5 * np.ptp(expected)
    np.testing.assert_allclose(logits_of_graph(tmp_path / "model.checkpoint", IDS), expected, rtol=0, atol=bound)
    build(BuildConfig(target="ref", precision="f32"), tmp_path / "model.checkpoint", tmp_path / "engine")
    np.testing.assert_allclose(engine_logits(tmp_path / "engine", IDS), expected, rtol=0, atol=bound)
    build(BuildConfig(target="ref"), tmp_path / "model.checkpoint", tmp_path / "auto")
    said = {name: f"stored as w8, because {why}" for name, why in lost.items()}
    assert read_manifest(tmp_path / "auto").lost_codes == said
    assert all(why in inspect(tmp_path / "auto").summary for why in lost.values())


def test_w8_keeps_bytes_beside_floats(tmp_path: Path) -> None:
    quantisation, packer, others, _ = CASES["bytes beside floats"]
    write_experts(tmp_path / "model", quantisation, packer, SIZES, others)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    with WeightReader(checkpoint) as reader:
        gate_up, down = (kept_bytes(reader, each, 0, matrix_shape(each)[0])[1] for each in stacks(checkpoint))
    assert down.all()
    np.testing.assert_array_equal(gate_up, np.tile(np.repeat([True, False], SIZES.inner), SIZES.experts))


@pytest.mark.parametrize(("dtype", "stored"), [(None, "bf16"), (DType.F16, "f16")])
def test_dtype_rounds_floats_beside_codes(tmp_path: Path, dtype: DType | None, stored: str) -> None:
    quantisation, packer, others, _ = CASES["ups are floats"]
    write_experts(tmp_path / "model", quantisation, packer, SIZES, others)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint", dtype=dtype))
    tensors = Checkpoint.open(tmp_path / "checkpoint").tensors()
    floats = {name: each for name, each in tensors.items() if name.endswith("/floats")}
    assert [name.split("/")[-3] for name in floats] == ["1", "3", "5"]
    assert {each.dtype.value for each in floats.values()} == {stored}
