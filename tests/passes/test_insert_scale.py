"""A number that an activation is multiplied with, or divided by."""

import numpy as np

from ingot.builder.passes.insert_scale import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def test_products_and_quotients() -> None:
    g = GraphMaker()
    x = g.node("Mul", g.constant(np.float32(0.22)), g.input())
    graph = g.finish(g.node("Div", x, g.constant(np.float32(8))))
    assert run_pass(PASS, graph).fired == 2
    assert ops_of(graph) == ["Gather", "Scale", "Scale"]
    assert [round(node.attrs["factor"], 6) for node in graph.nodes[1:]] == [0.22, 0.125]


def test_no_scale() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Mul", g.node("Mul", x, g.weight(8)), g.constant(np.float32(0))))
    assert run_pass(PASS, graph).refused == {"the factor is 0": 1}
    assert ops_of(graph) == ["Gather", "Mul", "Mul"]
