"""Rows of tables by ids and by positions become one Embedding."""

import numpy as np
import onnx
import pytest

from ingot.builder.graph import is_op, producer, weight_shape
from ingot.builder.passes import insert_matmul
from ingot.builder.passes.insert_embedding import PASS
from tests.passes.graphs import VOCAB, GraphMaker, ops_of, run_pass


def test_a_table() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Cast", g.input(), to=onnx.TensorProto.FLOAT))
    assert run_pass(PASS, graph).fired == 2
    assert ops_of(graph) == ["Embedding"]


@pytest.mark.parametrize(("limit", "rows", "expected"), [(64, 9, 9), (8, 9, 8)])
@pytest.mark.parametrize("cast", [True, False])
def test_learned_positions_join(limit: int, rows: int, expected: int, cast: bool) -> None:
    g = GraphMaker()
    learned = g.node("Gather", g.weight(rows, 8), g.positions(limit), axis=0)
    if cast:
        learned = g.node("Cast", learned, to=onnx.TensorProto.FLOAT)
    graph = g.finish(g.node("Add", learned, g.input()))
    assert run_pass(PASS, graph).fired == 2
    assert [node.op for node in graph.nodes if node.op != "Cast"] == ["Embedding"]
    assert graph.nodes[-1].attrs == {"positions": expected}


def test_a_narrow_table_is_widened_where_positions_follow() -> None:
    """The products of its rows become the table, to which positions join; nothing else is taken."""
    g = GraphMaker()
    narrow = g.node("Gather", g.weight(VOCAB, 4), "ids", axis=0)
    widened = g.node("MatMul", narrow, g.weight(4, 8))
    learned = g.node("Gather", g.weight(64, 8), g.positions(), axis=0)
    graph = g.finish(g.node("Add", widened, learned))
    assert run_pass(insert_matmul.PASS, graph).fired == 1
    assert run_pass(PASS, graph).fired == 2
    embedding = graph.nodes[-1]
    assert ops_of(graph)[-1] == "Embedding"
    assert weight_shape(embedding.inputs[1]) == (VOCAB, 8)
    assert is_op(producer(embedding.inputs[1]), "MatMul")
    assert len(embedding.inputs) == 3


def test_a_product_with_a_bias_is_no_wider_table() -> None:
    g = GraphMaker()
    widened = g.node("MatMul", g.node("Gather", g.weight(VOCAB, 4), "ids", axis=0), g.weight(4, 8))
    learned = g.node("Gather", g.weight(64, 8), g.positions(), axis=0)
    graph = g.finish(g.node("Add", g.node("Add", widened, g.weight(8)), learned))
    run_pass(insert_matmul.PASS, graph)
    assert run_pass(PASS, graph).refused["the product of the embedding has a bias or an activation"] == 1


def test_a_table_by_something_else_is_refused() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Gather", g.weight(64, 8), g.positions(), axis=0))
    assert run_pass(PASS, graph).refused == {"it is not indexed by the token ids": 1}


def test_positions_that_do_not_start_at_zero_are_refused() -> None:
    g = GraphMaker()
    later = g.node("Add", g.positions(), g.constant(np.int64(2)))
    learned = g.node("Gather", g.weight(64, 8), later, axis=0)
    graph = g.finish(g.node("Add", g.input(), learned))
    report = run_pass(PASS, graph)
    assert report.fired == 1
    assert report.refused["the second table is not indexed by positions"] == 1


def test_a_shared_token_embedding_is_refused() -> None:
    g = GraphMaker()
    tokens = g.input()
    learned = g.node("Gather", g.weight(64, 8), g.positions(), axis=0)
    graph = g.finish(g.node("Mul", tokens, g.node("Add", tokens, learned)))
    assert run_pass(PASS, graph).refused["the token embedding is used elsewhere"] == 1


def test_another_axis_is_refused() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Transpose", g.node("Gather", g.weight(8, VOCAB), "ids", axis=1), perm=[1, 2, 0]))
    assert run_pass(PASS, graph).refused == {"it does not gather rows of a table": 1}


@pytest.mark.parametrize("cast", [True, False])
def test_a_scale_joins(cast: bool) -> None:
    g = GraphMaker()
    x = g.node("Cast", g.input(), to=onnx.TensorProto.FLOAT) if cast else g.input()
    graph = g.finish(g.node("Mul", x, g.constant(np.float32(2.5))))
    run_pass(PASS, graph)
    assert ops_of(graph) == ["Embedding"]
    assert graph.nodes[-1].attrs == {"scale": 2.5}


def test_an_embedding_that_is_also_used_unscaled_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.node("Add", x, g.node("Mul", x, g.constant(np.float32(2.5)))))
    assert run_pass(PASS, graph).refused == {"the embedding is also used unscaled": 1}
