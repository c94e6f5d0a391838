"""The graph: canonical order, edits that leave nothing behind, shapes of weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from ingot.builder.graph import Graph, is_weight, producer, scalar, small_ints, weight_shape
from ingot.errors import CheckpointError, PassError
from tests.passes.graphs import GraphMaker


def test_replace_drops_what_became_unused() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Add", x, g.node("Relu", g.node("Tanh", x))))
    stream = graph.nodes[0].outputs[0]
    graph.replace(graph.logits, "Thing", [stream], {"size": 3})
    assert [node.op for node in graph.nodes] == ["Gather", "Thing"]
    assert graph.users(stream) == 1
    assert graph.users(graph.logits) == 1


def test_redirect_of_the_output() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Identity", g.input()))
    graph.redirect(graph.logits, graph.nodes[0].outputs[0])
    assert [node.op for node in graph.nodes] == ["Gather"]


def test_an_input_used_twice_counts_twice() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Add", x, x))
    assert graph.users(graph.nodes[0].outputs[0]) == 2


def test_shapes_of_weights() -> None:
    g = GraphMaker()
    w = g.node("Transpose", g.node("Cast", g.weight(3, 5), to=onnx.TensorProto.FLOAT))
    both = g.node("Concat", w, g.weight(4, 3), axis=-2)
    flat = g.node("Unsqueeze", g.node("Reshape", both, g.constant([0, -1])), g.constant([0, -1]))
    graph = g.finish(g.node("Add", g.input(), flat))
    weight = graph.logits.inputs[0].inputs[1]
    assert is_weight(weight)
    assert weight_shape(weight) == (1, 9, 3, 1)
    assert not is_weight(graph.logits)


def test_a_reshape_by_something_unknown_is_an_error() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Add", g.input(), g.node("Reshape", g.weight(8), g.weight(1))))
    with pytest.raises(PassError, match="with a shape that is not a constant"):
        weight_shape(graph.logits.inputs[0].inputs[1])


def test_small_values() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Reshape", g.input(), g.constant([0, 0, 8])))
    shape = graph.logits.inputs[0].inputs[1]
    assert small_ints(shape) == [0, 0, 8]
    assert scalar(shape) is None
    assert small_ints(graph.logits) is None
    large = GraphMaker()
    other = large.finish(large.node("Add", large.input(), large.constant(np.zeros(5000, np.int64))))
    assert small_ints(other.logits.inputs[0].inputs[1]) is None


def test_fresh_names_never_collide(tmp_path: Path) -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Relu", g.input()))
    graph.nodes[0].outputs[0].name = "ingot.1"
    again = Graph(graph.surgeon)
    made = again.insert("Relu", [again.logits], {})[0]
    assert made.name != "ingot.1"
    assert producer(made) is not None


def test_two_inputs_are_refused() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Relu", g.input())).surgeon
    graph.inputs = [*graph.inputs, graph.inputs[0].copy()]
    with pytest.raises(CheckpointError, match="not that of a language model"):
        Graph(graph)


@pytest.mark.parametrize("data", [b"", b"this is no protobuf at all"])
def test_an_unreadable_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(data)
    with pytest.raises(CheckpointError):
        Graph.load(tmp_path / "model.onnx")


def weighted() -> onnx.ModelProto:
    g = GraphMaker()
    made: onnx.ModelProto = gs.export_onnx(g.finish(g.node("Add", g.input(), g.weight(8))).surgeon)
    return made


def nowhere(graph: onnx.GraphProto) -> None:
    graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL


def misplaced(graph: onnx.GraphProto) -> None:
    nowhere(graph)
    for key, value in (("location", "model.safetensors"), ("offset", "x")):
        graph.initializer[0].external_data.add(key=key, value=value)


@pytest.mark.parametrize(("spoil", "words"), [(nowhere, "no location"), (misplaced, "invalid literal")])
def test_weights_that_lie_nowhere_are_refused(
    spoil: Callable[[onnx.GraphProto], None], words: str, tmp_path: Path
) -> None:
    model = weighted()
    spoil(model.graph)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=words):
        Graph.load(tmp_path / "m.onnx")


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    model = weighted()
    name = model.graph.initializer[0].name.encode()
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString().replace(name, b"\xff" * len(name)))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Graph.load(tmp_path / "m.onnx")
