"""Sums join the norm after them; the residual stream is the older summand, and goes on as the norm's second output."""

import pytest

from ingot.builder.graph import Graph, optional_input, producer
from ingot.builder.passes import insert_matmul, recognise_norms
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.fuse_residual_norm import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def fuse(graph: Graph) -> PassReport:
    recognise_norms.PASS.run(graph)
    insert_matmul.PASS.run(graph)
    return run_pass(PASS, graph)


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("norm", ["RMSNormalization", "LayerNormalization"])
def test_the_stream_goes_on(swapped: bool, norm: str) -> None:
    g = GraphMaker()
    stream = g.input()
    for _ in range(3):
        branch = g.linear(g.node(norm, stream, g.weight(8)), 8, 8)
        stream = g.node("Add", *([branch, stream] if swapped else [stream, branch]))
    graph = g.finish(stream)
    assert fuse(graph).fired == 2
    assert ops_of(graph).count("Add") == 1  # the last one has no norm after it
    first, second, third = (node for node in graph.nodes if node.op in ("RmsNorm", "LayerNorm"))
    assert len(first.inputs) == 2
    for made, before in ((second, first), (third, second)):
        residual = optional_input(made, 2 if norm[0] == "R" else 3)
        source = producer(residual)
        assert made.inputs[0].inputs[0].op == "Matmul"
        assert len(made.outputs) == 2
        assert source is not None
        assert source.op == "Gather" if before is first else source is before


def test_a_sum_that_nobody_else_reads_is_not_an_output() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("RMSNormalization", g.node("Add", g.input(), g.input()), g.weight(8)))
    assert fuse(graph).fired == 1
    assert len(graph.nodes[-1].outputs) == 1


def test_two_norms_of_one_sum() -> None:
    """As in models whose attention and MLP run side by side: one norm sums, the other reads the sum."""
    g = GraphMaker()
    stream = g.node("Add", g.input(), g.input())
    norms = [g.node("RMSNormalization", stream, g.weight(8)) for _ in range(2)]
    graph = g.finish(g.node("Add", *norms))
    assert fuse(graph).fired == 1
    assert ops_of(graph) == ["Gather", "Gather", "RmsNorm", "RmsNorm", "Add"]


def test_a_doubled_tensor_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("RMSNormalization", g.node("Add", x, x), g.weight(8)))
    assert fuse(graph).refused == {"both summands are the same": 1}


def test_an_added_weight_does_not_match() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("RMSNormalization", g.node("Add", g.input(), g.weight(8)), g.weight(8)))
    report = fuse(graph)
    assert (report.fired, report.refused) == (0, {})
