"""Every spelling of an activation becomes Activation with its name."""

from typing import Any

import numpy as np
import pytest

from ingot.builder.passes.recognise_activations import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass


@pytest.mark.parametrize(
    ("op", "attrs", "name"),
    [("Gelu", {}, "gelu"), ("Gelu", {"approximate": "tanh"}, "gelu_tanh"), ("Relu", {}, "relu"), ("Swish", {}, "silu")],
)
def test_one_node(op: str, attrs: dict[str, Any], name: str) -> None:
    g = GraphMaker()
    graph = g.finish(g.node(op, g.input(), **attrs))
    assert run_pass(PASS, graph).fired == 1
    assert graph.nodes[-1].attrs == {"activation": name}


@pytest.mark.parametrize("swapped", [True, False])
def test_silu_in_two_nodes(swapped: bool) -> None:
    g = GraphMaker()
    x = g.input()
    gate = g.node("Sigmoid", x)
    graph = g.finish(g.node("Mul", *([gate, x] if swapped else [x, gate])))
    assert run_pass(PASS, graph).fired == 1
    assert ops_of(graph) == ["Gather", "Activation"]


@pytest.mark.parametrize("squared", ["Mul", "Pow"])
@pytest.mark.parametrize(("inner", "refused"), [("Relu", 0), ("Gelu", 1)])
def test_a_squared_relu(squared: str, inner: str, refused: int) -> None:
    g = GraphMaker()
    kept = g.node(inner, g.input())
    other = kept if squared == "Mul" else g.constant(np.float32(2))
    graph = g.finish(g.node(squared, kept, other))
    report = run_pass(PASS, graph)
    assert report.refused == ({"the square of gelu is not an activation": 1} if refused else {})
    assert (ops_of(graph) == ["Gather", "Activation"]) is not bool(refused)
    assert refused or graph.nodes[-1].attrs == {"activation": "relu2"}


def test_the_sigmoid_of_something_else_stays() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Mul", g.input(), g.node("Sigmoid", g.input())))
    report = run_pass(PASS, graph)
    assert (report.fired, report.refused) == (0, {})


def test_another_swish_is_refused() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("Swish", g.input(), alpha=2.0))
    assert run_pass(PASS, graph).refused == {"a Swish with alpha 2.0 is not silu": 1}


@pytest.mark.parametrize(("cap", "factor", "fits"), [(3.0, 3.0, True), (3.0, 2.0, False)])
def test_a_cap(cap: float, factor: float, fits: bool) -> None:
    g = GraphMaker()
    bent = g.node("Tanh", g.node("Div", g.input(), g.constant(np.float32(cap))))
    graph = g.finish(g.node("Mul", bent, g.constant(np.float32(factor))))
    report = run_pass(PASS, graph)
    assert report.refused == ({} if fits else {"2.0 * Tanh(x / 3.0) is not a cap": 1})
    assert (ops_of(graph) == ["Gather", "Softcap"]) is fits
