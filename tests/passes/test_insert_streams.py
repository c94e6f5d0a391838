"""insert_streams: fires on the Graph that convert writes; what only looks like it stays, with the reason."""

import numpy as np
import pytest

from ingot.builder.graph import Graph
from ingot.builder.passes import insert_streams
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.convert.families import gemma3n_text
from tests.passes.graphs import GraphMaker, evaluate, ops_of, run_pass
from tests.passes.test_insert_linear_attention import converted

COUNT, WIDTH = 3, 4


def test_it_fires(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = converted(tmp_path_factory.mktemp("streams"), gemma3n_text.FAMILY.tiny)
    graph = Graph.load(folder / "model.onnx")
    run_passes(graph, structure_passes())
    ops = [node.op for node in graph.nodes if node.domain == "ingot"]
    counts = [ops.count(op) for op in ("MixStreams", "AddToStreams", "MatchMagnitude", "CutBelow")]
    assert counts == [3, 6, 3, 1]
    assert sum(node.attrs["joins"] for node in graph.plugins("MatchMagnitude")) == 1
    assert [len(node.inputs) for node in graph.plugins("AddToStreams")] == [3, 2] * 3


def split(g: GraphMaker, x: str, count: int = COUNT, width: int = WIDTH) -> str:
    return g.node("Reshape", x, g.constant([0, 0, count, width]))


def joined(g: GraphMaker, x: str, columns: int = COUNT * WIDTH) -> str:
    return g.node("Reshape", x, g.constant([0, 0, columns]))


def mixed(*, count: int = COUNT) -> Graph:
    g = GraphMaker()
    x = split(g, g.input(COUNT * WIDTH))
    matrix = split(g, g.input(count * COUNT), count, COUNT)
    return g.finish(joined(g, g.node("Add", x, g.node("MatMul", matrix, x)), max(count, COUNT) * WIDTH))


def followed(*, one: float = 1.0) -> Graph:
    g = GraphMaker()
    given, made = g.input(COUNT * WIDTH), g.input(WIDTH)
    active = g.node("Gather", split(g, given), g.constant(1), axis=2)
    row = g.node("Unsqueeze", g.node("Sub", made, active), g.constant([2]))
    coefs = g.node("Add", g.input(COUNT), g.constant(np.float32(one)))
    column = g.node("Unsqueeze", coefs, g.constant([-1]))
    return g.finish(joined(g, g.node("Add", split(g, given), g.node("Mul", row, column))))


def ended(others: list[float]) -> Graph:
    g = GraphMaker()
    row = g.node("Unsqueeze", g.input(WIDTH), g.constant([2]))
    taken = g.node("Mul", row, g.constant(np.array(others, np.float32)[:, None]))
    return g.finish(joined(g, g.node("Add", split(g, g.input(COUNT * WIDTH)), taken)))


def matched(*, joins: bool = False) -> Graph:
    g = GraphMaker()
    x, like = split(g, g.input(COUNT * WIDTH)), g.input(WIDTH)
    last = g.constant([-1])
    square = g.node("ReduceMean", g.node("Mul", x, x), last, keepdims=1)
    own = g.node("Sqrt", g.node("Max", square, g.constant(np.float32(1e-3))))
    wanted = g.node("Sqrt", g.node("ReduceMean", g.node("Mul", like, like), last, keepdims=1))
    column = g.node("Unsqueeze", wanted, g.constant([2]))
    y = joined(g, g.node("Div", g.node("Mul", x, column), own))
    return g.finish(g.node("Concat", like, y, axis=-1) if joins else y)


def cut(*, axis: int = -1) -> Graph:
    g = GraphMaker()
    x, last = g.input(8), g.constant([axis])
    mean = g.node("ReduceMean", x, last, keepdims=1)
    apart = g.node("Sub", x, mean)
    wide = g.node("Sqrt", g.node("ReduceMean", g.node("Mul", apart, apart), last, keepdims=1))
    bound = g.node("Add", mean, g.node("Mul", wide, g.constant(np.float32(0.5))))
    return g.finish(g.node("Relu", g.node("Sub", x, bound)))


@pytest.mark.parametrize(
    ("graph", "op"),
    [
        (mixed(), "MixStreams"),
        (followed(), "AddToStreams"),
        (ended([1, 0, 1]), "AddToStreams"),
        (matched(), "MatchMagnitude"),
        (matched(joins=True), "MatchMagnitude"),
        (cut(), "CutBelow"),
    ],
    ids=["mixed", "followed", "ended", "matched", "joined", "cut"],
)
def test_the_numbers_stay(graph: Graph, op: str) -> None:
    before = evaluate(graph)
    assert run_pass(insert_streams.PASS, graph).fired > 0
    assert ops_of(graph).count(op) == 1
    assert not {"Reshape", "ReduceMean", "Relu", "Concat"} & set(ops_of(graph))
    np.testing.assert_allclose(evaluate(graph), before, atol=1e-5)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (mixed(count=1), "what is added to the streams is not a matrix times the streams"),
        (ended([1, 2, 1]), "the added tensor does not go to all streams but one"),
        (cut(axis=1), "mean and variance are not those of a row"),
    ],
    ids=["matrix", "factors", "columns"],
)
def test_what_is_refused(graph: Graph, reason: str) -> None:
    report = run_pass(insert_streams.PASS, graph)
    assert (report.fired, reason in report.refused) == (0, True), report.refused


def test_another_sum_is_not_taken() -> None:
    graph = followed(one=2.0)
    run_pass(insert_streams.PASS, graph)
    assert "AddToStreams" not in ops_of(graph)
