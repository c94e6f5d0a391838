"""Router, experts and their weighted sum become MoeRoute, MoeGateUp and MoeDown; what differs in one place stays."""

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from ingot.builder.graph import Graph, weight_shape
from ingot.builder.passes import insert_matmul, insert_moe, recognise_activations
from ingot.builder.passes.base import PassReport
from tests.passes.graphs import GraphMaker, ops_of, run_pass

HIDDEN, EXPERTS, INNER = 8, 5, 6


def experts(**changes: Any) -> Graph:
    """A layer's experts as convert writes them; `changes` replace one thing each."""
    g = GraphMaker()
    x = g.input(HIDDEN)
    scores = g.linear(x, HIDDEN, EXPERTS) if changes.get("router", True) else g.node("Gelu", g.input(EXPERTS))
    shares = g.node("Softmax", scores, axis=changes.get("softmax_axis", -1))
    count = g.constant([changes.get("per_token", 2)])
    top = g.node("TopK", shares, count, outputs=2, axis=changes.get("top_axis", -1), largest=changes.get("largest", 1))
    weights, chosen = top, f"{top}.1"
    if changes.get("normalized", True):
        over = g.constant([changes.get("total_axis", -1)])
        total = g.node("ReduceSum", weights, over, keepdims=changes.get("total_keepdims", 1))
        weights = g.node("Div", weights, total)
    if changes.get("other_experts", False):
        chosen = f"{g.node('TopK', g.node('Neg', shares), count, outputs=2, axis=-1)}.1"
    zeros = g.node("ConstantOfShape", g.node("Shape", shares))
    if changes.get("filled", False):
        zeros = g.node(
            "ConstantOfShape", g.node("Shape", shares), value=numpy_helper.from_array(np.ones(1, np.float32))
        )
    scattered = g.node("ScatterElements", zeros, chosen, weights, **changes.get("scatter", {"axis": -1}))
    by_expert = g.node("Transpose", scattered, perm=changes.get("by_expert", [0, 2, 1]))
    column = g.node("Unsqueeze", by_expert, g.constant([changes.get("column_axis", -1)]))
    alike = g.node("Unsqueeze", x, g.constant([1]))
    both = g.node("MatMul", alike, _stacked(g, 2 * INNER, HIDDEN, changes.get("stored_in_out", False)))
    sizes = changes.get("sizes", [INNER, INNER])
    gate = g.node("Split", both, g.constant(sizes), outputs=2, **changes.get("split", {"axis": -1}))
    gated = g.node("Mul", g.node("Gelu", gate), gate if changes.get("squared") else f"{gate}.1")
    made = g.node("MatMul", gated, _stacked(g, HIDDEN, changes.get("inner", INNER)))
    weighted = g.node("Mul", *([column, made] if changes.get("swapped") else [made, column]))
    summed = g.node("ReduceSum", weighted, g.constant([changes.get("sum_axis", 1)]), keepdims=0)
    return g.finish(summed)


def _stacked(g: GraphMaker, size_out: int, size_in: int, in_out: bool = False) -> str:
    if in_out:
        return g.weight(EXPERTS, size_in, size_out)
    return g.node("Transpose", g.weight(EXPERTS, size_out, size_in), perm=[0, 2, 1])


def insert(graph: Graph) -> PassReport:
    insert_matmul.PASS.run(graph)
    recognise_activations.PASS.run(graph)
    return run_pass(insert_moe.PASS, graph)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, EXPERTS])
@pytest.mark.parametrize("swapped", [True, False])
def test_three_plugins(normalized: bool, per_token: int, swapped: bool) -> None:
    graph = experts(normalized=normalized, per_token=per_token, swapped=swapped)
    assert insert(graph).fired == 1
    assert ops_of(graph) == ["Gather", "Matmul", "MoeRoute", "MoeGateUp", "MoeDown"]
    route, gate_up, down = graph.nodes[-3:]
    assert route.attrs == {"per_token": per_token, "normalized": int(normalized)}
    assert gate_up.attrs == {"activation": "gelu"}
    assert weight_shape(gate_up.inputs[2]) == (EXPERTS, 2 * INNER, HIDDEN)
    assert weight_shape(down.inputs[3]) == (EXPERTS, HIDDEN, INNER)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"router": False}, "the router is no product with a weight"),
        ({"softmax_axis": 1}, "the experts are not taken by a softmax over all"),
        ({"largest": 0}, "the experts taken are not a fixed number of the largest"),
        ({"other_experts": True}, "the weights go elsewhere than where they come from"),
        ({"filled": True}, "experts that are not taken weigh something"),
        ({"stored_in_out": True}, "the experts' weights are not stored [experts, out, in]"),
        ({"squared": True}, "the second factor is not the other half of the product"),
        ({"top_axis": 1}, "the experts taken are not a fixed number of the largest"),
        ({"total_axis": 1}, "the weights are not divided by their sum"),
        ({"total_axis": -2}, "the weights are not divided by their sum"),
        ({"total_keepdims": 0}, "the weights are not divided by their sum"),
        ({"scatter": {"axis": 1}}, "the weights are laid out along another axis"),
        ({"scatter": {}}, "the weights are laid out along another axis"),
        ({"scatter": {"axis": -1, "reduction": "add"}}, "experts that are not taken weigh something"),
        ({"by_expert": [1, 2, 0]}, "the weights are laid out along another axis"),
        ({"split": {}}, f"the parts have sizes [{INNER}, {INNER}] of {2 * INNER}"),
        ({"split": {"axis": 2}}, f"the parts have sizes [{INNER}, {INNER}] of {2 * INNER}"),
        ({"sizes": [INNER + 1, INNER - 1]}, f"the parts have sizes [{INNER + 1}, {INNER - 1}] of {2 * INNER}"),
        ({"inner": INNER + 1}, "experts of shapes (5, 12, 8) and (5, 8, 7) do not fit together"),
        ({"column_axis": 1}, "the experts are not side by side"),
        ({"sum_axis": 2}, "the sum does not run over the experts"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    graph = experts(**changes)  # some of these compute nothing that fits together
    insert_matmul.PASS.run(graph)
    recognise_activations.PASS.run(graph)
    report = insert_moe.PASS.run(graph)
    assert (report.fired, list(report.refused)) == (0, [reason])


def test_a_router_of_fewer_experts_is_refused() -> None:
    graph = experts()
    insert_matmul.PASS.run(graph)
    recognise_activations.PASS.run(graph)
    (product,) = graph.plugins("Matmul")
    product.inputs[1] = graph.constant(np.zeros((EXPERTS - 1, HIDDEN), np.float32))
    report = insert_moe.PASS.run(graph)
    assert report.refused == {f"2 of {EXPERTS - 1} are taken, of {EXPERTS} experts": 1}
