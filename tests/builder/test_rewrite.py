"""The matcher: names, both orders, alternatives, numbers, weights."""

import numpy as np
import pytest

from ingot.builder.graph import Graph
from ingot.builder.rewrite import Either, Match, Number, Op, W, X, match
from tests.passes.graphs import GraphMaker


def root_match(graph: Graph, pattern: Op) -> Match | None:
    return match(pattern, graph.nodes[-1])


def test_a_name_twice_is_the_same_tensor() -> None:
    g = GraphMaker()
    x, other = g.input(), g.input()
    pattern = Op("Mul", X("x"), Op("Sigmoid", X("x")))
    assert root_match(g.finish(g.node("Mul", x, g.node("Sigmoid", x))), pattern) is not None
    assert root_match(g.finish(g.node("Mul", other, g.node("Sigmoid", x))), pattern) is None


@pytest.mark.parametrize(("op", "fits"), [("Add", True), ("Mul", True), ("Sub", False)])
def test_only_add_and_mul_commute(op: str, fits: bool) -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node(op, g.node("Relu", x), x))
    found = root_match(graph, Op(op, X("x"), Op("Relu", X("x"), name="relu")))
    assert (found is not None) == fits
    if found is not None:
        assert found["relu"].op == "Relu"
        assert found["x"] is graph.nodes[0].outputs[0]


def test_backtracking_through_alternatives() -> None:
    """The first alternative fits by itself but binds x to the wrong tensor."""
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Sub", g.node("Relu", g.node("Relu", x)), x))
    pattern = Op("Sub", Either(Op("Relu", X("x")), Op("Relu", Op("Relu", X("x")))), X("x"))
    found = root_match(graph, pattern)
    assert found is not None
    assert found["x"] is graph.nodes[0].outputs[0]


def test_numbers_and_weights() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Pow", g.node("Add", g.input(), g.weight(8)), g.constant(np.float32(2))))
    assert root_match(graph, Op("Pow", Op("Add", X("x"), W("w")), Number("two", value=2.0))) is not None
    assert root_match(graph, Op("Pow", X("x"), Number(value=3.0))) is None
    assert root_match(graph, Op("Pow", X("x"), X("y"))) is None
    assert root_match(graph, Op("Pow", W("x"), Number())) is None


def test_a_pattern_may_list_fewer_inputs_but_not_more() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("LayerNormalization", g.input(), g.weight(8), g.weight(8)))
    assert root_match(graph, Op("LayerNormalization", X("x"))) is not None
    assert root_match(graph, Op("LayerNormalization", X("x"), W("a"), W("b"), W("c"))) is None


def test_domains_are_told_apart() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Relu", g.input()))
    assert root_match(graph, Op("Relu", X("x"), domain="ingot")) is None
