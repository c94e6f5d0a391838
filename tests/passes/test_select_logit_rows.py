"""The gather goes as far towards the inputs as rows stay independent, and no further."""

import pytest

from ingot.builder.passes import insert_embedding, insert_matmul, recognise_norms
from ingot.builder.passes.select_logit_rows import PASS
from ingot.errors import PassError
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def test_up_to_what_the_sum_before_the_norm_adds() -> None:
    g = GraphMaker()
    stream = g.node("Add", g.input(), g.input())
    graph = g.finish(g.linear(g.node("RMSNormalization", stream, g.weight(8)), 8, 5))
    for each in (insert_embedding, recognise_norms, insert_matmul):
        each.PASS.run(graph)
    assert run_pass(PASS, graph).fired == 2
    assert ops_of(graph) == ["Embedding", "GatherRows", "Embedding", "GatherRows", "Add", "RmsNorm", "Matmul"]


def test_what_another_op_reads_too_is_computed_for_all_rows_and_gathered_once() -> None:
    g = GraphMaker()
    norm = g.node("RMSNormalization", g.input(), g.weight(8))
    graph = g.finish(g.linear(g.node("Add", norm, g.node("Sigmoid", norm)), 8, 5))
    recognise_norms.PASS.run(graph)
    insert_matmul.PASS.run(graph)
    run_pass(PASS, graph)
    assert ops_of(graph) == ["Gather", "RmsNorm", "GatherRows", "Sigmoid", "GatherRows", "Add", "Matmul"]


def test_a_bias_is_no_row() -> None:
    g = GraphMaker()
    graph = g.finish(g.linear(g.node("Add", g.node("Tanh", g.input()), g.weight(8)), 8, 5))
    insert_matmul.PASS.run(graph)
    run_pass(PASS, graph)
    assert ops_of(graph) == ["Gather", "Tanh", "Add", "GatherRows", "Matmul"]


def test_logits_from_something_else_are_an_error() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Tanh", g.input()))
    with pytest.raises(
        PassError, match=r"do not come from a matmul(.|\n)*Tanh(.|\n)*no pass replaces Tanh(.|\n)*pipeline"
    ):
        PASS.run(graph)
