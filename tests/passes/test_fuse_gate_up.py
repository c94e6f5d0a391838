"""Two products and an activation become one gated product, however they are stored."""

import pytest

from ingot.builder.graph import Graph, weight_shape
from ingot.builder.passes import insert_matmul, recognise_activations
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.fuse_gate_up import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def fuse(graph: Graph) -> PassReport:
    insert_matmul.PASS.run(graph)
    recognise_activations.PASS.run(graph)
    return run_pass(PASS, graph)


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("swapped", [True, False])
def test_two_products(biases: tuple[bool, bool], swapped: bool) -> None:
    g = GraphMaker()
    x = g.input()
    gate, up = g.linear(x, 8, 6, bias=biases[0]), g.linear(x, 8, 6, bias=biases[1])
    gate = g.node("Gelu", gate)
    graph = g.finish(g.node("Mul", *([up, gate] if swapped else [gate, up])))
    assert fuse(graph).fired == 1
    assert ops_of(graph) == ["Gather", "Matmul"]
    product = graph.nodes[-1]
    assert (product.attrs["gated"], product.attrs["activation"]) == (1, "gelu")
    assert weight_shape(product.inputs[1]) == (12, 8)
    assert len(product.inputs) == 2 + any(biases)


@pytest.mark.parametrize("sizes", [[6, 6], None])
def test_halves_of_one_product(sizes: list[int] | None) -> None:
    g = GraphMaker()
    both = g.linear(g.input(), 8, 12, bias=True)
    if sizes:
        gate = g.node("Split", both, g.constant(sizes), outputs=2, axis=-1)
    else:
        gate = g.node("Split", both, outputs=2, axis=-1, num_outputs=2)
    graph = g.finish(g.node("Mul", g.node("Gelu", gate), f"{gate}.1"))
    assert fuse(graph).fired == 1
    assert ops_of(graph) == ["Gather", "Matmul"]


def test_different_inputs_do_not_match() -> None:
    g = GraphMaker()
    gate, up = g.linear(g.input(), 8, 6), g.linear(g.input(), 8, 6)
    report = fuse(g.finish(g.node("Mul", g.node("Gelu", gate), up)))
    assert (report.fired, report.refused) == (0, {})


def test_products_that_are_used_elsewhere_are_refused() -> None:
    g = GraphMaker()
    x = g.input()
    gate, up = g.linear(x, 8, 6), g.linear(x, 8, 6)
    graph = g.finish(g.node("Add", up, g.node("Mul", g.node("Gelu", gate), up)))
    assert fuse(graph).refused == {"gate or up is used elsewhere or has an epilogue": 1}


def test_an_activation_that_is_used_elsewhere_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    gate, up = g.node("Gelu", g.linear(x, 8, 6)), g.linear(x, 8, 6)
    graph = g.finish(g.node("Add", gate, g.node("Mul", gate, up)))
    assert fuse(graph).refused == {"the activation is used elsewhere": 1}


def test_uneven_parts_are_refused() -> None:
    g = GraphMaker()
    gate = g.node("Split", g.linear(g.input(), 8, 7), g.constant([6, 1]), outputs=2, axis=-1)
    graph = g.finish(g.node("Mul", g.node("Gelu", gate), f"{gate}.1"))
    assert fuse(graph).refused == {"the parts have sizes [6, 1] of 7": 1}
