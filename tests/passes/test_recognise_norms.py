"""Norms are recognised in every spelling, and left alone where they are none."""

import numpy as np
import pytest

from ingot.builder.passes.recognise_norms import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass

EPS = np.float32(0.01)


@pytest.mark.parametrize("axis", [-1, 2])
def test_the_standard_ops(axis: int) -> None:
    g = GraphMaker()
    x = g.node("RMSNormalization", g.input(), g.weight(8), axis=axis, epsilon=0.01)
    x = g.node("LayerNormalization", x, g.weight(8), g.weight(8), axis=axis)
    graph = g.finish(g.node("LayerNormalization", x, g.weight(8)))
    assert run_pass(PASS, graph).fired == 3
    assert ops_of(graph) == ["Gather", "RmsNorm", "LayerNorm", "LayerNorm"]
    assert graph.nodes[1].attrs["eps"] == pytest.approx(0.01)


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("divide", ["Div", "Reciprocal", "OneOver"])
@pytest.mark.parametrize("weight_first", [True, False])
def test_rms_norm_in_elementary_ops(square: str, divide: str, weight_first: bool) -> None:
    g = GraphMaker()
    x = g.input()
    squared = g.node("Pow", x, g.constant(np.float32(2))) if square == "Pow" else g.node("Mul", x, x)
    mean = g.node("ReduceMean", squared, g.constant([-1]))
    root = g.node("Sqrt", g.node("Add", mean, g.constant(EPS)))
    if divide == "Div":
        scaled = g.node("Div", x, root)
    elif divide == "Reciprocal":
        scaled = g.node("Mul", x, g.node("Reciprocal", root))
    else:
        scaled = g.node("Mul", g.node("Div", g.constant(np.float32(1)), root), x)
    weight = g.weight(8)
    graph = g.finish(g.node("Mul", *([weight, scaled] if weight_first else [scaled, weight])))
    assert run_pass(PASS, graph).fired == 1
    assert ops_of(graph) == ["Gather", "RmsNorm"]


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_in_elementary_ops(bias: bool) -> None:
    g = GraphMaker()
    x = g.input()
    centred = g.node("Sub", x, g.node("ReduceMean", x, g.constant([-1])))
    variance = g.node("ReduceMean", g.node("Pow", centred, g.constant(np.float32(2))), g.constant([-1]))
    scaled = g.node("Div", centred, g.node("Sqrt", g.node("Add", variance, g.constant(EPS))))
    y = g.node("Mul", scaled, g.weight(8))
    graph = g.finish(g.node("Add", y, g.weight(8)) if bias else y)
    assert run_pass(PASS, graph).fired == 1 + bias
    assert ops_of(graph) == ["Gather", "LayerNorm"]
    assert len(graph.nodes[-1].inputs) == 2 + bias


def test_a_mean_over_another_dimension_is_refused() -> None:
    g = GraphMaker()
    x = g.input()
    mean = g.node("ReduceMean", g.node("Mul", x, x), g.constant([1]))
    root = g.node("Sqrt", g.node("Add", mean, g.constant(EPS)))
    graph = g.finish(g.node("Mul", g.node("Div", x, root), g.weight(8)))
    report = run_pass(PASS, graph)
    assert report.fired == 0
    assert report.refused == {"its mean does not run over the last dimension alone": 1}


def test_a_square_of_something_else_does_not_match() -> None:
    g = GraphMaker()
    x, other = g.input(), g.input()
    mean = g.node("ReduceMean", g.node("Mul", other, other), g.constant([-1]))
    root = g.node("Sqrt", g.node("Add", mean, g.constant(EPS)))
    graph = g.finish(g.node("Mul", g.node("Div", x, root), g.weight(8)))
    report = run_pass(PASS, graph)
    assert (report.fired, report.refused) == (0, {})


def test_a_norm_over_two_dimensions_is_refused() -> None:
    g = GraphMaker()
    graph = g.finish(g.node("RMSNormalization", g.input(), g.weight(7, 8), axis=1))
    assert run_pass(PASS, graph).refused == {"it does not run over the last dimension alone": 1}


def test_a_bias_after_a_shared_norm_is_refused() -> None:
    g = GraphMaker()
    norm = g.node("LayerNormalization", g.input(), g.weight(8))
    graph = g.finish(g.node("Mul", g.node("Add", norm, g.weight(8)), norm))
    report = run_pass(PASS, graph)
    assert report.fired == 1
    assert report.refused == {"the norm has a bias already or is used without this one": 1}
