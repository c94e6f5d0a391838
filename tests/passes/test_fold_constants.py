"""Constants are computed once; weights and whatever depends on the ids stay."""

import numpy as np
import onnx
from onnx import numpy_helper

from ingot.builder.passes.fold_constants import PASS
from tests.passes.graphs import GraphMaker, run_pass


def test_chains_of_constants_fold() -> None:
    g = GraphMaker()
    shape = g.node("Concat", g.constant([0, 0]), g.node("Unsqueeze", g.constant(np.int64(2)), g.constant([0])), axis=0)
    shape = g.node("Concat", shape, g.node("Mul", g.constant([2]), g.constant([2])), axis=0)
    graph = g.finish(g.node("Reshape", g.node("Reshape", g.input(), shape), g.constant([0, 0, 8])))
    assert run_pass(PASS, graph).fired == 4
    assert [node.op for node in graph.nodes] == ["Gather", "Reshape", "Reshape"]
    assert graph.nodes[1].inputs[1].values.tolist() == [0, 0, 2, 4]


def test_constant_nodes_and_identities_vanish() -> None:
    g = GraphMaker()
    value = numpy_helper.from_array(np.array(3, np.float32))
    x = g.node("Mul", g.node("Identity", g.input()), g.node("Constant", value=value))
    x = g.node("Add", x, g.node("Constant", value_float=2.0))
    graph = g.finish(x)
    assert run_pass(PASS, graph).fired == 3
    assert [node.op for node in graph.nodes] == ["Gather", "Mul", "Add"]


def test_what_depends_on_the_ids_stays() -> None:
    g = GraphMaker()
    turns = g.node("Unsqueeze", g.node("Cast", g.positions(), to=onnx.TensorProto.FLOAT), g.constant([-1]))
    graph = g.finish(g.node("Add", g.input(), turns))
    before = [node.op for node in graph.nodes]
    assert run_pass(PASS, graph).fired == 0
    assert [node.op for node in graph.nodes] == before


def test_external_weights_are_not_read() -> None:
    g = GraphMaker()
    weight = onnx.TensorProto(name="external", data_type=onnx.TensorProto.FLOAT, dims=[8])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="not-there.safetensors")
    g._initializers.append(weight)
    graph = g.finish(g.node("Add", g.input(), g.node("Cast", "external", to=onnx.TensorProto.FLOAT)))
    assert PASS.run(graph).fired == 0
    assert [node.op for node in graph.nodes] == ["Gather", "Cast", "Add"]
