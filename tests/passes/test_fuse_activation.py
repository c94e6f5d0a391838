"""Activations join products; what remains of gating is one Activation with a factor."""

import pytest

from ingot.builder.graph import Graph
from ingot.builder.passes import insert_matmul, recognise_activations
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.fuse_activation import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def fuse(graph: Graph) -> PassReport:
    insert_matmul.PASS.run(graph)
    recognise_activations.PASS.run(graph)
    return run_pass(PASS, graph)


@pytest.mark.parametrize("bias", [True, False])
def test_an_epilogue(bias: bool) -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Relu", g.linear(g.input(), 8, 6, bias=bias)))
    assert fuse(graph).fired == 1
    assert ops_of(graph) == ["Gather", "Matmul"]
    assert graph.nodes[-1].attrs == {"activation": "relu", "gated": 0}


def test_a_product_that_is_used_elsewhere_is_refused() -> None:
    g = GraphMaker()
    product = g.linear(g.input(), 8, 6)
    graph = g.finish(g.node("Sub", g.node("Relu", product), product))
    assert fuse(graph).refused == {"the product is used elsewhere or has an epilogue": 1}
    assert ops_of(graph) == ["Gather", "Matmul", "Activation", "Sub"]


def test_a_factor_joins_the_activation() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Mul", g.node("Relu", x), g.node("RMSNormalization", x, g.weight(8))))
    assert fuse(graph).fired == 1
    assert ops_of(graph) == ["Gather", "RMSNormalization", "Activation"]
    assert graph.nodes[-1].attrs == {"activation": "relu"}


def test_a_product_of_two_activations_is_gating_without_a_function() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Mul", g.input(), g.input()))
    assert fuse(graph).fired == 1
    assert graph.nodes[-1].attrs == {"activation": "none"}


def test_a_square_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    assert fuse(g.finish(g.node("Mul", x, x))).refused == {"a square is not a gate": 1}
