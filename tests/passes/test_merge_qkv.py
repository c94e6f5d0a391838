"""The three products before an attention become one and a Split."""

import pytest

from ingot.builder.graph import Graph, weight_shape
from ingot.builder.passes import insert_matmul
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.merge_qkv import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def merge(graph: Graph) -> PassReport:
    insert_matmul.PASS.run(graph)
    return run_pass(PASS, graph)


def product_of(graph: Graph) -> list[tuple[int, ...]]:
    return [weight_shape(tensor) for node in graph.nodes if node.op == "Matmul" for tensor in node.inputs[1:]]


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True), (True, False, True)])
def test_three_products(rotated: bool, biases: tuple[bool, bool, bool]) -> None:
    g = GraphMaker()
    x = g.input()
    sources = [g.linear(x, 8, n * 4, bias=bias) for n, bias in zip((4, 2, 2), biases, strict=True)]
    graph = g.finish(g.attention(sources, 4, 2, 4, angles=g.angles(2) if rotated else None))
    assert merge(graph).fired == 1
    assert ops_of(graph).count("Matmul") == 1
    assert product_of(graph) == [(32, 8)] + [(32,)] * any(biases)


def test_keys_that_are_values_as_well() -> None:
    g = GraphMaker()
    x = g.input()
    q, k = g.heads(g.linear(x, 8, 16), 4, 4), g.heads(g.linear(x, 8, 8), 2, 4)
    mixed = g.node("Attention", q, k, k, is_causal=1)
    graph = g.finish(g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, 16])))
    assert merge(graph).fired == 1
    assert product_of(graph) == [(24, 8)]


def test_keys_and_values_of_another_layer_stay() -> None:
    g = GraphMaker()
    x = g.input()
    q = g.node("Split", g.linear(x, 8, 24), g.constant([8, 8, 8]), outputs=3, axis=-1)
    graph = g.finish(g.attention([g.linear(x, 8, 8), f"{q}.1", f"{q}.2"], 2, 2, 4))
    assert merge(graph).refused == {"k and v are those of another layer": 1}


def test_one_product_stays() -> None:
    g = GraphMaker()
    q = g.node("Split", g.linear(g.input(), 8, 24), g.constant([8, 8, 8]), outputs=3, axis=-1)
    graph = g.finish(g.attention([q, f"{q}.1", f"{q}.2"], 2, 2, 4))
    report = merge(graph)
    assert report.fired == 0
    assert report.refused == {"q, k and v are one product already": 1}


def test_products_of_different_inputs_are_refused() -> None:
    g = GraphMaker()
    x = g.input()
    sources = [g.linear(x, 8, 8), g.linear(x, 8, 8), g.linear(g.input(), 8, 8)]
    assert merge(g.finish(g.attention(sources, 2, 2, 4))).refused == {"q, k and v are products of different inputs": 1}


def test_a_product_that_is_used_elsewhere_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    shared = g.linear(x, 8, 8)
    mixed = g.attention([shared, g.linear(x, 8, 8), shared], 2, 2, 4)
    assert merge(g.finish(mixed)).refused == {"q, k or v is used elsewhere or has an epilogue": 1}


def test_something_else_than_a_product_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    mixed = g.attention([g.linear(x, 8, 8), g.linear(x, 8, 8), x], 2, 2, 4)
    assert merge(g.finish(mixed)).refused == {"q, k or v is not a product with a weight": 1}


def test_heads_that_are_not_transposed_are_refused() -> None:
    g = GraphMaker()
    x = g.node("Unsqueeze", g.input(), g.constant([1]))
    graph = g.finish(g.node("Attention", x, x, x, is_causal=1))
    assert list(merge(graph).refused) == [
        "q, k or v does not come from a transpose of [batch, sequence, heads, head_dim]"
    ]
