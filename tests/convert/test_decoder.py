"""The Graph: standard ops, weights outside, readable by every ONNX reader wherever the bits lie."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.configs.read import Section
from ingot.convert.convert import convert
from ingot.convert.decoder import build_graph
from ingot.convert.family import read_model
from ingot.convert.weight_shapes import weight_shapes
from ingot.dtypes import DType
from ingot.tensor_file import TensorFileWriter, TensorSpec, read_header, read_rows
from tests.handmade import TINY_GPT2, TINY_LLAMA, Bits, random_tensors, write_model, write_safetensors
from tests.real_models import REAL_MODELS

IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def run(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"input_ids": IDS})[0]
    return result


def evaluated(path: Path) -> np.ndarray:
    """The logits of onnx's own slow interpreter."""
    (logits,) = ReferenceEvaluator(str(path)).run(None, {"input_ids": IDS})
    assert isinstance(logits, np.ndarray)
    return logits


def checkpoint(folder: Path, config: dict[str, object], dtype: DType) -> Path:
    source = write_model(folder / "m", config, dtype=dtype)
    convert(ConvertOptions(model_dir=source, output_dir=folder / "c"))
    return folder / "c"


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16], ids=str)
def test_checker_runtime_and_reference_agree(tmp_path: Path, config: dict[str, object], dtype: DType) -> None:
    path = checkpoint(tmp_path, config, dtype) / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    expected = evaluated(path)
    assert np.abs(run(path) - expected).max() < 1e-5 * np.ptp(expected)


def shifted(file: Path, remainder: int) -> None:
    """Rewrite a bf16 file so that its bits begin `remainder` bytes after a multiple of 8."""
    tensors: dict[str, tuple[DType, Bits]] = {
        name: (DType.BF16, read_rows(stored)) for name, stored in read_header(file).items()
    }
    for padding in range(8):
        write_safetensors(file, tensors, padding=padding)
        if min(stored.offset for stored in read_header(file).values()) % 8 == remainder:
            return
    raise AssertionError("no padding gives this remainder")


@pytest.mark.daily(1)
@pytest.mark.parametrize("remainder", [1, 2, 3, 7])
def test_unaligned_bits_give_the_same_logits(tmp_path: Path, remainder: int) -> None:
    folder = checkpoint(tmp_path, TINY_LLAMA, DType.BF16)
    expected = run(folder / "model.onnx")
    model = Checkpoint.open(folder).config.model
    assert model is not None
    shifted(folder / "model.safetensors", remainder)
    graph = build_graph(model, read_header(folder / "model.safetensors"))
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    np.testing.assert_array_equal(run(folder / "model.onnx"), expected)
    assert np.abs(evaluated(folder / "model.onnx") - expected).max() < 1e-5 * np.ptp(expected)


def test_the_face_of_the_graph(tmp_path: Path) -> None:
    model = onnx.load(checkpoint(tmp_path, TINY_LLAMA, DType.BF16) / "model.onnx", load_external_data=False)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 23)]
    assert model.ir_version <= 11
    (ids,), (logits,) = model.graph.input, model.graph.output
    assert (ids.name, ids.type.tensor_type.elem_type) == ("input_ids", onnx.TensorProto.INT64)
    assert (logits.name, logits.type.tensor_type.elem_type) == ("logits", onnx.TensorProto.FLOAT)
    assert [dim.dim_param or dim.dim_value for dim in logits.type.tensor_type.shape.dim] == ["batch", "sequence", 61]
    operators = {node.op_type for node in model.graph.node}
    assert {"Attention", "RotaryEmbedding", "RMSNormalization"} <= operators
    names = [node.name for node in model.graph.node]
    assert len(names) == len(set(names))
    assert "layers.1/attn/q/matmul" in names


def test_weights_are_outside_and_stored_once(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {**TINY_LLAMA, "tie_word_embeddings": True}, DType.BF16)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    inside = [tensor for tensor in model.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    outside = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    assert sum(len(tensor.raw_data) for tensor in inside) < 1000
    stored = read_header(folder / "model.safetensors")
    places = {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in outside}
    assert places == {
        name: {"location": "model.safetensors", "offset": str(tensor.offset), "length": str(tensor.nbytes)}
        for name, tensor in stored.items()
    }
    users = [node.op_type for node in model.graph.node if "embed/weight" in node.input]
    assert sorted(users) == ["Cast", "Gather"]
    assert len({node.name for node in model.graph.node if node.op_type == "Cast" and "embed/weight" in node.input}) == 1


def test_weight_shapes_are_the_tensors_of_the_model() -> None:
    for config in (TINY_LLAMA, TINY_GPT2):
        model = read_model(Section(config, "config.json"), None)[1]
        shapes = sorted(bits.shape for _, bits in random_tensors(config).values())
        assert sorted(weight_shapes(model).values()) == shapes


def test_a_graph_of_a_large_model_needs_no_weights(tmp_path: Path) -> None:
    """Llama 3.1 405B: 126 layers; only headers are looked at."""
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    model = read_model(Section(config, "config.json"), None)[1]
    specs = [TensorSpec(name=name, dtype=DType.BF16, shape=shape) for name, shape in weight_shapes(model).items()]
    assert sum(spec.nbytes for spec in specs) == 2 * 405_853_388_800
    graph = build_graph(model, TensorFileWriter(tmp_path / "model.safetensors", specs).tensors)
    assert graph.ByteSize() < 1 << 20


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_GPT2], ids=["llama", "gpt2"])
def test_more_tokens_than_positions_are_an_error(tmp_path: Path, config: dict[str, object]) -> None:
    """Angles have no table that would end, so that the graph counts."""
    path = checkpoint(tmp_path, config, DType.F32) / "model.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    most = int(str(config.get("max_position_embeddings", config.get("n_positions"))))
    ids = np.arange(most + 1)[None] % 7
    assert np.isfinite(session.run(None, {"input_ids": ids[:, :-1]})[0]).all()
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match=f"at_most_{most}_tokens"):
        session.run(None, {"input_ids": ids})


SHOWN_DAILY = "gemma-4-26b-a4b"  # which has factors of experts


@pytest.mark.parametrize(
    "name", [SHOWN_DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in REAL_MODELS if name != SHOWN_DAILY)]
)
def test_weights_of_two_bytes(tmp_path: Path, name: str) -> None:
    """As files of the Hub store them: each is cast in the graph, also one whose name does not end as most do."""
    (tmp_path / "config.json").write_text(json.dumps(REAL_MODELS[name].shrunk()))
    convert(ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / "c"))
    assert {each.dtype for each in Checkpoint.open(tmp_path / "c").tensors().values()} >= {DType.BF16}
    onnx.checker.check_model(str(tmp_path / "c" / "model.onnx"))
    assert np.isfinite(run(tmp_path / "c" / "model.onnx")).all()
