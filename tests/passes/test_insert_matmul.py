"""Products with weights become Matmul with a bias; the weight is an expression of shape [N, K]."""

from ingot.builder.graph import is_weight, weight_shape
from ingot.builder.passes.insert_matmul import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def test_stored_out_in() -> None:
    g = GraphMaker()
    graph = g.finish(g.linear(g.input(), 8, 5))
    assert run_pass(PASS, graph).fired == 1
    assert [node.op for node in graph.nodes] == ["Gather", "Matmul"]  # the transpose is gone
    assert weight_shape(graph.nodes[-1].inputs[1]) == (5, 8)


def test_stored_in_out() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("MatMul", g.input(), g.weight(8, 5)))
    assert run_pass(PASS, graph).fired == 1
    weight = graph.nodes[-1].inputs[1]
    assert is_weight(weight)
    assert weight_shape(weight) == (5, 8)


def test_a_bias_joins() -> None:
    g = GraphMaker()
    product = g.node("MatMul", g.input(), g.weight(8, 5))
    graph = g.finish(g.node("Add", g.weight(5), product))
    assert run_pass(PASS, graph).fired == 2
    assert ops_of(graph) == ["Gather", "Matmul"]
    assert weight_shape(graph.nodes[-1].inputs[2]) == (5,)


def test_an_addition_that_is_no_bias_is_refused() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Add", g.linear(g.input(), 8, 5), g.weight(7, 5)))
    report = run_pass(PASS, graph)
    assert report.fired == 1
    assert report.refused == {"what is added has shape (7, 5), not (5,)": 1}


def test_a_second_bias_is_refused() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Add", g.linear(g.input(), 8, 5, bias=True), g.weight(5)))
    assert run_pass(PASS, graph).refused == {"the product has a bias already": 1}


def test_a_product_that_is_used_without_the_bias_is_refused() -> None:
    g = GraphMaker()
    product = g.linear(g.input(), 8, 5)
    graph = g.finish(g.node("Mul", product, g.node("Add", product, g.weight(5))))
    assert run_pass(PASS, graph).refused == {"the product is also used without this bias": 1}


def test_a_product_of_activations_stays() -> None:
    g = GraphMaker()
    x = g.input(7)
    graph = g.finish(g.node("MatMul", x, x))
    report = run_pass(PASS, graph)
    assert (report.fired, report.refused) == (0, {})


def test_a_batched_weight_is_refused() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("MatMul", g.input(), g.weight(2, 8, 5)))
    assert run_pass(PASS, graph).refused == {"its weight has 3 dimensions": 1}
