"""The graph in float64 numpy is what onnxruntime computes in float32, for every family."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ingot.builder.evaluate import Evaluation, _attention
from ingot.builder.expressions import WeightReader
from ingot.builder.graph import Graph
from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.errors import CheckpointError
from tests.families import covering_families
from tests.handmade import TINY_LLAMA, write_model

IDS = np.random.default_rng(1).integers(0, 61, (2, 23))


def _checkpoint(folder: Path, config: Mapping[str, object]) -> Path:
    convert(ConvertOptions(model_dir=write_model(folder / "model", config), output_dir=folder / "checkpoint"))
    return folder / "checkpoint"


@pytest.mark.daily(4)
@pytest.mark.parametrize(("name", "more"), [*((name, {}) for name in covering_families()), ("falcon", {"alibi": True})])
def test_logits_of_families_that_cover_all(name: str, more: Mapping[str, object], tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, {**find_family(name).tiny, **more})
    expected = onnxruntime.InferenceSession(checkpoint / "model.onnx").run(None, {"input_ids": IDS})[0]
    graph = Graph.load(checkpoint / "model.onnx")
    with WeightReader(Checkpoint.open(checkpoint)) as reader:
        found = Evaluation(graph, reader, IDS, {graph.logits.name}).value(graph.logits.name)
    assert found.dtype == np.float64
    assert np.abs(found - expected).max() < 1e-5 * np.ptp(expected)


def test_values_come_in_any_order_and_once(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, TINY_LLAMA)
    graph = Graph.load(checkpoint / "model.onnx")
    names = [node.outputs[0].name for node in graph.nodes if node.op == "RMSNormalization"]
    with WeightReader(Checkpoint.open(checkpoint)) as reader:
        values = Evaluation(graph, reader, IDS, names)
        last, first = values.value(names[-1]), values.value(names[0])
        assert last.shape == first.shape == (2, 23, 32)
        with pytest.raises(CheckpointError, match="does not compute"):
            values.value(names[0])


def test_a_node_that_numpy_cannot_compute_is_named(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, TINY_LLAMA)
    model = onnx.load(checkpoint / "model.onnx", load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Sigmoid").op_type = "Riddle"
    onnx.save(model, checkpoint / "model.onnx")
    graph = Graph.load(checkpoint / "model.onnx")
    with (
        WeightReader(Checkpoint.open(checkpoint)) as reader,
        pytest.raises(CheckpointError, match=r"cannot be computed(.|\n)*Riddle 'layers.0/mlp"),
    ):
        Evaluation(graph, reader, IDS, {graph.logits.name}).value(graph.logits.name)


def attention_node(**attrs: Any) -> tuple[gs.Node, list[npt.NDArray[np.float64]]]:
    """Of 4 heads of queries and 2 of keys and values, 5 tokens."""
    draw = np.random.default_rng(0)
    values = [draw.normal(size=(1, heads, 5, 8)) for heads in (4, 2, 2)]
    tensors = [gs.Variable(name) for name in "qkv"]
    return gs.Node("Attention", attrs=attrs, inputs=tensors, outputs=[gs.Variable("y")]), values


@pytest.mark.parametrize("attrs", [{}, {"is_causal": 1}, {"is_causal": 0}, {"scale": 0.7}, {"softcap": 0.5}])
def test_attention_and_its_defaults_are_the_standards(attrs: dict[str, Any]) -> None:
    node, (q, k, v) = attention_node(**attrs)
    made = helper.make_node("Attention", ["q", "k", "v"], ["y"], **attrs)
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None) for name in "qkvy"]
    graph = helper.make_graph([made], "g", infos[:3], infos[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    (expected,) = ReferenceEvaluator(model).run(None, {"q": q, "k": k, "v": v})
    assert _attention(node, [q, k, v]) == pytest.approx(expected, abs=1e-6)


def test_values_that_are_not_seen_do_not_spoil() -> None:
    node, (q, k, v) = attention_node(is_causal=1)
    sound = _attention(node, [q, k, v])
    v[0, 1, 3, 2] = np.inf
    found = _attention(node, [q, k, v])
    spoiled = np.zeros(found.shape, np.bool_)
    spoiled[0, 2:, 3:, 2] = True  # heads 2 and 3 read it, from its token on
    assert np.array_equal(np.isnan(found), spoiled)
    assert found[~spoiled] == pytest.approx(sound[~spoiled])
