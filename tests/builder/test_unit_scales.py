"""K-quants of GGUF in their own units: which engines keep them so, the bits of CPUs, and numbers that do not fit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import pytest

from ingot.builder.build import build
from ingot.builder.expressions import WeightReader
from ingot.builder.graph import Graph
from ingot.builder.kept import kept_precision, read_grid
from ingot.builder.kept_rows import kept_rows
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.builder.precision import product_weight, products_of
from ingot.builder.unit_scales import in_units
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.header import read_gguf_header
from ingot.dtypes import Precision
from ingot.engine import read_manifest
from ingot.errors import CheckpointError
from ingot.plugins.unit_rows import UnitRows
from ingot.weight_formats import UNIT_COLUMNS
from tests import gguf_files
from tests.builder.engines import engine_logits
from tests.builder.test_kept import products
from tests.convert.gguf.test_architectures import CASES as ARCHITECTURES
from tests.convert.gguf.test_architectures import write_case
from tests.convert.gguf.test_blocks import IDS, write_llama

Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS = 10, 11, 12, 13, 14, 23
Numbers = npt.NDArray[Any]


def write_checkpoint(folder: Path, kind: int, kinds: dict[str, int] | None = None) -> Path:
    write_llama(folder, kind, kinds=kinds)
    convert(ConvertOptions(model_dir=folder / "model.gguf", output_dir=folder / "checkpoint"))
    return folder / "checkpoint"


def weight_of(checkpoint: Path, name: str) -> gs.Tensor:
    """The weight of a matmul whose name has this part."""
    graph = Graph.load(checkpoint / "model.onnx")
    run_passes(graph, structure_passes())
    for node in products_of(graph):
        weight = product_weight(node)
        if name in _leaf(weight):
            return weight
    raise AssertionError(name)


def _leaf(tensor: gs.Tensor) -> str:
    while tensor.inputs:
        tensor = tensor.inputs[0].inputs[0]
    return str(tensor.name)


class Changed(WeightReader):
    """change: (tensor, numbers) → what is read in their place"""

    def __init__(self, checkpoint: Path, change: Callable[[gs.Tensor, Numbers], Numbers]) -> None:
        super().__init__(Checkpoint.open(checkpoint))
        self._change = change

    def read_numbers(self, tensor: gs.Tensor, begin: int, end: int) -> Numbers:
        return self._change(tensor, super().read_numbers(tensor, begin, end))


def unchanged(tensor: gs.Tensor, numbers: Numbers) -> Numbers:
    return numbers


@pytest.mark.parametrize(
    ("kind", "kept"), [(Q2_K, "w2ksg16"), (Q3_K, "w3kg16"), (Q4_K, "w4ksg32"), (Q5_K, "w5ksg32"), (Q6_K, "w6kg16")]
)
def test_every_number_is_kept(tmp_path: Path, kind: int, kept: str) -> None:
    """Codes, scales and offsets are those of the file, and so are all values, bit for bit."""
    checkpoint = write_checkpoint(tmp_path, kind)
    weight = weight_of(checkpoint, "down")
    assert str(kept_precision(weight)) == kept
    with Changed(checkpoint, unchanged) as reader:
        rows = kept_rows(reader, weight, [(16, 48), (3, 5)], Precision.parse(kept))
        wanted = np.concatenate([reader.read_rows(weight, 16, 48), reader.read_rows(weight, 3, 5)])
    assert isinstance(rows, UnitRows)
    assert rows.values.tobytes() == wanted.tobytes()
    assert (rows.scale == 1).all()
    part = rows.columns(UNIT_COLUMNS, 2 * UNIT_COLUMNS)
    assert part.values.tobytes() == np.ascontiguousarray(wanted[:, UNIT_COLUMNS : 2 * UNIT_COLUMNS]).tobytes()


def test_a_part_of_a_unit_is_kept_in_another_format(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, Q4_K)
    weight = weight_of(checkpoint, "down")
    found = {}
    for begin, end in ((0, UNIT_COLUMNS), (UNIT_COLUMNS, 2 * UNIT_COLUMNS), (32, 32 + UNIT_COLUMNS), (0, 384)):
        part = gs.Variable(f"part{begin}_{end}")
        ends = [gs.Constant(f"{part.name}.{i}", np.array([at], np.int64)) for i, at in enumerate((begin, end, 1))]
        gs.Node(op="Slice", inputs=[weight, *ends], outputs=[part])
        found[begin, end] = str(kept_precision(part))
    assert list(found.values()) == ["w4ksg32", "w4ksg32", "w4tsg32", "w4tsg32"]
    assert str(kept_precision(weight, units=3)) == "w4tsg32"


def test_rows_of_two_kinds_are_not_one_weight_in_units(tmp_path: Path) -> None:
    """Q5_K has offsets, Q6_K none: together they are bytes with float16 scales."""
    checkpoint = write_checkpoint(tmp_path, Q5_K, {"attn_v": Q6_K})
    report = build(BuildConfig(target="ref", activations="bf16"), checkpoint, tmp_path / "engine")
    groups = {step.name: step.kernel.split(".")[1] for step in report.plan.steps if step.op == "matmul"}
    assert groups["layers.0/qk"] == "w5ks"
    assert groups["layers.0/v"] == "w6k"


@pytest.mark.parametrize(
    ("other", "v"), [(Q2_K, "w2ksg16"), (Q3_K, "w3kg16"), (IQ4_XS, "w4tg32")], ids=["Q2_K", "Q3_K", "IQ4_XS"]
)
def test_units_are_kept_beside_others_of_as_many_bits(tmp_path: Path, other: int, v: str) -> None:
    """As in Q2_K and Q3_K_M, whose v is Q4_K: no scale of Q4_K or Q2_K is rounded for the sake of a neighbour's."""
    checkpoint = write_checkpoint(tmp_path, Q4_K, {"attn_v": other, "ffn_up": other})
    report = build(BuildConfig(target="ref", activations="bf16"), checkpoint, tmp_path / "engine")
    found = products(report)
    four = ("w4ksg32", 0.0)
    assert (found["layers.0/qk.weight"], found["layers.0/gate.weight"]) == (four, four)
    assert {found[f"layers.0/{name}.weight"][0] for name in ("v", "up")} == {v}
    assert report.precision == "w4ksg32"


@pytest.mark.parametrize(
    "options",
    [{"target": "ref"}, {"target": "ref", "refit": True}, {"target": "ref,cuda/sm90"}, {"target": "ref,tensorrt/sm90"}],
    ids=str,
)
def test_which_engines_keep_units(tmp_path: Path, options: dict[str, Any]) -> None:
    """All targets of an engine share its weights."""
    checkpoint = write_checkpoint(tmp_path, Q4_K)
    config = BuildConfig(**{"activations": "bf16", "kv_cache_dtype": "f32", "dry_run": True, **options})
    report = build(config, checkpoint, tmp_path / "engine")
    assert report.precision == "w4ksg32"
    assert "w4ts" not in {weight.dtype.value for weight in report.plan.weights}
    assert not any("computes no w4ks" in note for note in report.notes)


@pytest.mark.parametrize(
    ("kind", "what", "change", "got"),
    [
        (Q2_K, "codes", 4, "codes from 0 to 3"),
        (Q2_K, "counts", -1, "scales or offsets from 0 to 127"),
        (Q3_K, "codes", 4, "codes from -4 to 3"),
        (Q4_K, "counts", 128, "scales or offsets from 0 to 127"),
        (Q4_K, "counts", -1, "scales or offsets from 0 to 127"),
        (Q5_K, "codes", 32, "codes from 0 to 31"),
        (Q6_K, "codes", 32, "codes from -32 to 31"),
        (Q6_K, "codes", -33, "codes from -32 to 31"),
        (Q6_K, "unit", 1 + 2**-12, "units that float16 holds"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, kind: int, what: str, change: float, got: str) -> None:
    """Nothing wraps: an edited Checkpoint gets an error, not other weights."""
    checkpoint = write_checkpoint(tmp_path, kind)
    weight = weight_of(checkpoint, "down")
    grid = read_grid(weight)
    assert grid is not None
    scale = in_units(grid.scale)
    assert scale is not None
    changed = {"codes": grid.codes, "counts": scale.counts, "unit": scale.unit}[what]

    def with_one(tensor: gs.Tensor, numbers: Numbers) -> Numbers:
        if tensor is not changed:
            return numbers
        found = numbers.astype(np.float32 if what != "codes" else np.int32)
        found[-1, -1] = change
        return found

    precision = kept_precision(weight)
    assert precision is not None
    with Changed(checkpoint, with_one) as reader, pytest.raises(CheckpointError, match="cannot have") as refused:
        kept_rows(reader, weight, [(0, 16)], precision)
    assert got in str(refused.value)
    assert str(refused.value.where).startswith(f"{checkpoint / 'model.onnx'}: ")
    assert "convert the model again" in str(refused.value)


@pytest.mark.parametrize(
    ("unit", "axis", "found"),
    [((24, 8), -1, True), ((24, 8), 2, True), ((24, 8), 1, False), ((1, 8), -1, False), ((8,), -1, False)],
)
def test_units_of_another_form_are_others(unit: tuple[int, ...], axis: int, found: bool) -> None:
    """In a graph of one's own, units may be spread over the numbers of groups, or shared by all rows."""
    kinds = {"counts": (onnx.TensorProto.INT8, (24, 64)), "unit": (onnx.TensorProto.FLOAT16, unit)}
    stored = []
    for name, (kind, dims) in kinds.items():
        place = [onnx.StringStringEntryProto(key="location", value="weights")]
        stored.append(
            onnx.TensorProto(
                name=name, data_type=kind, dims=dims, data_location=onnx.TensorProto.EXTERNAL, external_data=place
            )
        )
    integers = {"by_unit": [0, 8, 8], "axis": [axis], "groups": [0, 64]}
    stored += [onnx.numpy_helper.from_array(np.array(each), name) for name, each in integers.items()]
    nodes = [
        onnx.helper.make_node("Cast", ["counts"], ["integers"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Reshape", ["integers", "by_unit"], ["counted"]),
        onnx.helper.make_node("Cast", ["unit"], ["units"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Unsqueeze", ["units", "axis"], ["spread"]),
        onnx.helper.make_node("Mul", ["counted", "spread"], ["product"]),
        onnx.helper.make_node("Reshape", ["product", "groups"], ["scales"]),
    ]
    scales = onnx.helper.make_tensor_value_info("scales", onnx.TensorProto.FLOAT, [24, 64])
    graph = gs.import_onnx(onnx.helper.make_model(onnx.helper.make_graph(nodes, "of scales", [], [scales], stored)))
    assert (in_units(graph.outputs[0]) is not None) == found


@pytest.mark.native
@pytest.mark.parametrize("kind", [Q2_K, Q3_K, Q4_K, Q6_K])
def test_an_engine_has_the_logits_of_the_reference(tmp_path: Path, kind: int) -> None:
    checkpoint = write_checkpoint(tmp_path, kind)
    config = BuildConfig(target="ref", activations="int8", autotune=False)
    build(config, checkpoint, tmp_path / "ref")
    build(dataclasses.replace(config, target="cpu/avx2"), checkpoint, tmp_path / "cpu")
    wanted, got = engine_logits(tmp_path / "ref", IDS), engine_logits(tmp_path / "cpu", IDS)
    assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.native
def test_experts_of_k_quants(tmp_path: Path) -> None:
    """As in Q4_K_M: gates and ups of four bits, downs of six; all experts of a layer are one weight."""
    case = ARCHITECTURES["qwen3moe"]
    change = {"hidden_size": UNIT_COLUMNS, "moe_intermediate_size": UNIT_COLUMNS}
    path, _ = write_case(tmp_path, "qwen3moe", dataclasses.replace(case, change={**case.change, **change}))
    header, data, rng = read_gguf_header(path), path.read_bytes(), np.random.default_rng(1)
    tensors = dict[str, gguf_files.Stored]()
    for key, each in header.tensors.items():
        if "_exps" in key:
            tensors[key], _ = gguf_files.random_blocks(rng, Q6_K if "down" in key else Q4_K, each.shape)
        else:
            values = np.frombuffer(data[each.offset : each.offset + each.nbytes], np.float32)
            tensors[key] = gguf_files.floats(values.reshape(each.shape))
    gguf_files.write_gguf(tmp_path / "q.gguf", dict(header.settings), tensors)
    convert(ConvertOptions(model_dir=tmp_path / "q.gguf", output_dir=tmp_path / "checkpoint"))
    logits = {}
    for target in ("ref", "cpu/avx2"):
        config = BuildConfig(target=target, activations="int8", autotune=False)
        report = build(config, tmp_path / "checkpoint", tmp_path / target)
        kernels = {step.op: step.kernel.split(".")[1] for step in report.plan.steps if step.op.startswith("moe_")}
        assert (kernels["moe_gate_up"], kernels["moe_down"]) == ("w4ksa8", "w6ka8")
        logits[target] = engine_logits(tmp_path / target, IDS)
    assert np.abs(logits["cpu/avx2"] - logits["ref"]).max() < 2e-5 * np.abs(logits["ref"]).max()
    errors = read_manifest(tmp_path / "ref").weight_errors
    assert {errors[weight.name] for weight in report.plan.weights if len(weight.shape) == 3} == {0.0}
