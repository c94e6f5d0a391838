"""A sum with an activation times one gate per row becomes AddGated; other gates stay."""

from ingot.builder.graph import Graph
from ingot.builder.passes import insert_add_gated, insert_matmul
from tests.passes.graphs import GraphMaker, ops_of, run_pass


def gated(*, columns: int = 1, swapped: bool = False, used: bool = False) -> Graph:
    g = GraphMaker()
    x = g.input(8)
    a, b = g.linear(x, 8, 8), g.linear(x, 8, 8)
    gate = g.node("Sigmoid", g.linear(x, 8, columns))
    product = g.node("Mul", *([gate, b] if swapped else [b, gate]))
    y = g.node("Add", *([product, a] if swapped else [a, product]))
    graph = g.finish(g.node("Add", y, product) if used else y)
    insert_matmul.PASS.run(graph)
    return graph


def test_one_plugin_in_either_order() -> None:
    for swapped in (False, True):
        graph = gated(swapped=swapped)
        assert run_pass(insert_add_gated.PASS, graph).fired == 1
        assert ops_of(graph) == ["Gather", "Matmul", "Matmul", "Matmul", "AddGated"]


def test_what_is_refused() -> None:
    report = run_pass(insert_add_gated.PASS, gated(columns=8))
    assert (report.fired, report.refused) == (0, {"the gate has 8 columns": 1})
    report = run_pass(insert_add_gated.PASS, gated(used=True))
    assert report.refused == {"what is gated is used elsewhere": 2}
