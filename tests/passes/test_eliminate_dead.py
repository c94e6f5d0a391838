"""What the logits do not need goes; everything else stays, in an order that the file does not decide."""

from ingot.builder.passes.eliminate_dead import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def test_unused_nodes_go() -> None:
    g = GraphMaker()
    x = g.input()
    g.node("Sigmoid", g.node("Relu", x))
    graph = g.finish(g.node("Tanh", x))
    assert run_pass(PASS, graph).fired == 2
    assert ops_of(graph) == ["Gather", "Tanh"]
    assert [len(tensor.outputs) for tensor in graph.nodes[0].outputs] == [1]


def test_nothing_to_drop() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Tanh", g.input()))
    assert run_pass(PASS, graph).fired == 0
