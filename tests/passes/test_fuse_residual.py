"""The sums that are left: epilogue of a product, else an Add of our own."""

from ingot.builder.graph import Graph, optional_input
from ingot.builder.passes import insert_matmul
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.fuse_residual import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def fuse(graph: Graph) -> PassReport:
    insert_matmul.PASS.run(graph)
    return run_pass(PASS, graph)


def test_an_epilogue() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Add", x, g.linear(x, 8, 8, bias=True)))
    assert fuse(graph).fired == 1
    assert ops_of(graph) == ["Gather", "Matmul"]
    assert optional_input(graph.nodes[-1], 3) is not None


def test_without_a_bias_its_place_stays_empty() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Add", g.linear(x, 8, 8), x))
    assert fuse(graph).fired == 1
    assert optional_input(graph.nodes[-1], 2) is None
    assert optional_input(graph.nodes[-1], 3) is graph.nodes[0].outputs[0]


def test_a_product_that_is_used_elsewhere_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    product = g.linear(x, 8, 8)
    graph = g.finish(g.node("Mul", product, g.node("Add", product, x)))
    report = fuse(graph)
    assert report.refused == {"the product is also used without the residual": 1}
    assert ops_of(graph) == ["Gather", "Matmul", "Add", "Mul"]
    assert graph.nodes[-2].domain == "ingot"


def test_a_second_residual_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Add", g.node("Add", g.linear(x, 8, 8), x), g.input()))
    report = fuse(graph)
    assert report.fired == 2
    assert report.refused == {"the product has a residual already": 1}
    assert ops_of(graph) == ["Gather", "Matmul", "Gather", "Add"]
