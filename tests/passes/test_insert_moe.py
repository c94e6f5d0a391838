"""Router, experts and their weighted sum become MoeRoute, MoeGateUp and MoeDown; what differs in one place stays."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from ingot.builder.graph import Graph, weight_shape
from ingot.builder.passes import insert_matmul, insert_moe, recognise_activations
from ingot.builder.passes.base import PassReport
from tests.passes.graphs import VOCAB, GraphMaker, ops_of, run_pass

HIDDEN, EXPERTS, INNER = 8, 6, 5


def experts(**changes: Any) -> Graph:
    """A layer's experts as convert writes them; `changes` replace one thing each."""
    g = GraphMaker()
    x = g.input(HIDDEN)
    scores = g.linear(x, HIDDEN, EXPERTS) if changes.get("router", True) else g.node("Gelu", g.input(EXPERTS))
    score = changes.get("score", "Softmax")
    shares = g.node(score, scores, **({"axis": changes.get("softmax_axis", -1)} if score == "Softmax" else {}))
    keys = g.node("Add", shares, g.weight(EXPERTS)) if changes.get("bias") else shares
    if changes.get("groups"):
        keys = _of_best_groups(g, keys, changes)
    count = g.constant([changes.get("per_token", 2)])
    top = g.node("TopK", keys, count, outputs=2, axis=changes.get("top_axis", -1), largest=changes.get("largest", 1))
    weights, chosen = top, f"{top}.1"
    if keys != shares and not changes.get("keys_as_weights"):
        weights = g.node("GatherElements", shares, chosen, axis=changes.get("gather_axis", 2))
    if changes.get("normalized", True):
        over = g.constant([changes.get("total_axis", -1)])
        total = g.node("ReduceSum", weights, over, keepdims=changes.get("total_keepdims", 1))
        for op, number in changes.get("total", ()):
            total = g.node(op, total, g.constant(np.float32(number)))
        weights = g.node("Div", weights, total)
    if changes.get("scale"):
        weights = g.node("Mul", weights, g.constant(np.float32(changes["scale"])))
    if changes.get("other_experts", False):
        chosen = f"{g.node('TopK', g.node('Neg', shares), count, outputs=2, axis=-1)}.1"
    if changes.get("swapped_experts"):
        chosen = f"{g.node('TopK', keys, count, outputs=2, axis=-1)}.1"
    zeros = g.node("ConstantOfShape", g.node("Shape", shares))
    if changes.get("filled", False):
        zeros = g.node(
            "ConstantOfShape", g.node("Shape", shares), value=numpy_helper.from_array(np.ones(1, np.float32))
        )
    scattered = g.node("ScatterElements", zeros, chosen, weights, **changes.get("scatter", {"axis": -1}))
    by_expert = g.node("Transpose", scattered, perm=changes.get("by_expert", [0, 2, 1]))
    column = g.node("Unsqueeze", by_expert, g.constant([changes.get("column_axis", -1)]))
    alike = g.node("Unsqueeze", x, g.constant([1]))
    gated = _first_half(g, alike, changes)
    made = g.node("MatMul", gated, _stacked(g, HIDDEN, changes.get("inner", INNER)))
    if changes.get("biased"):
        made = g.node("Add", made, _bias(g, (EXPERTS, HIDDEN)))
    weighted = g.node("Mul", *([column, made] if changes.get("swapped") else [made, column]))
    summed = g.node("ReduceSum", weighted, g.constant([changes.get("sum_axis", 1)]), keepdims=0)
    return g.finish(g.linear(summed, HIDDEN, VOCAB) if changes.get("head") else summed)


def _first_half(g: GraphMaker, alike: str, changes: dict[str, Any]) -> str:
    """What the second product reads."""
    gates = changes.get("gates", True)
    both = g.node(
        "MatMul", alike, _stacked(g, (2 if gates else 1) * INNER, HIDDEN, changes.get("stored_in_out", False))
    )
    if changes.get("biased"):
        both = g.node("Add", both, _bias(g, changes.get("bias_shape", (EXPERTS, 2 * INNER))))
    if not gates:
        return g.node("Gelu", both)
    sizes = changes.get("sizes", [INNER, INNER])
    gate = g.node("Split", both, g.constant(sizes), outputs=2, **changes.get("split", {"axis": -1}))
    if changes.get("limit"):
        return _clamped(g, gate, f"{gate}.1", changes)
    return g.node("Mul", g.node("Gelu", gate), gate if changes.get("squared") else f"{gate}.1")


def _bias(g: GraphMaker, shape: tuple[int, ...]) -> str:
    return g.node("Unsqueeze", g.weight(*shape), g.constant([1]))


def _clamped(g: GraphMaker, gate: str, up: str, changes: dict[str, Any]) -> str:
    """As gpt-oss has it: gates are clamped from above, ups on both sides, and one is added to these."""
    limits = [g.constant(np.float32(each)) for each in (changes["limit"], changes.get("up_limit", changes["limit"]))]
    least = g.constant(np.float32(-changes["limit"]))
    clamped = g.node("Min", gate, limits[0])
    up = g.node("Max", g.node("Min", up, limits[1]), least)
    sharper = g.node("Mul", gate if changes.get("unclamped_share") else clamped, g.constant(np.float32(1.702)))
    glu = g.node("Mul", clamped, g.node("Sigmoid", sharper))
    return g.node("Mul", glu, g.node("Add", up, g.constant(np.float32(changes.get("offset", 1.0)))))


def _of_best_groups(g: GraphMaker, keys: str, changes: dict[str, Any]) -> str:
    """Keys of the experts in the best two of three groups, minus infinity for the others."""
    grouped = g.node("Reshape", keys, g.constant([0, 0, 3, EXPERTS // 3]))
    best = g.node("TopK", grouped, g.constant([changes.get("best", 2)]), outputs=2, axis=-1)
    sums = g.node("ReduceSum", best, g.constant([-1]), keepdims=0)
    top = g.node("TopK", sums, g.constant([2]), outputs=2, axis=-1)
    zeros = g.node("ConstantOfShape", g.node("Shape", sums))
    one = numpy_helper.from_array(np.ones(1, np.float32))
    ones = g.node("ConstantOfShape", g.node("Shape", f"{top}.1"), value=one)
    marked = g.node("ScatterElements", zeros, f"{top}.1", ones, axis=changes.get("marked_axis", -1))
    column = g.node("Unsqueeze", g.node("Cast", marked, to=TensorProto.BOOL), g.constant([-1]))
    kept = g.node("Where", column, grouped, g.constant(np.float32(changes.get("never", -np.inf))))
    return g.node("Reshape", kept, g.constant([0, 0, EXPERTS]))


def _stacked(g: GraphMaker, size_out: int, size_in: int, in_out: bool = False) -> str:
    if in_out:
        return g.weight(EXPERTS, size_in, size_out)
    return g.node("Transpose", g.weight(EXPERTS, size_out, size_in), perm=[0, 2, 1])


PLAIN = {"score": "softmax", "eps": 0.0, "floor": 0.0, "scale": 1.0, "groups": 1, "group_top": 1, "group_best": 2}


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
    assert route.attrs == {**PLAIN, "per_token": per_token, "normalized": int(normalized)}
    assert gate_up.attrs == {"activation": "gelu", "gated": 1}
    assert (len(gate_up.inputs), len(down.inputs)) == (3, 4)
    assert weight_shape(gate_up.inputs[2]) == (EXPERTS, 2 * INNER, HIDDEN)
    assert weight_shape(down.inputs[3]) == (EXPERTS, HIDDEN, INNER)


@pytest.mark.parametrize("biased", [True, False])
def test_experts_without_gates(biased: bool) -> None:
    graph = experts(gates=False, biased=biased, bias_shape=(EXPERTS, INNER))
    assert insert(graph).fired == 1
    (gate_up,), (down,) = graph.plugins("MoeGateUp"), graph.plugins("MoeDown")
    assert gate_up.attrs == {"activation": "gelu", "gated": 0}
    assert (len(gate_up.inputs), len(down.inputs)) == (3 + biased, 4 + biased)
    assert weight_shape(gate_up.inputs[2]) == (EXPERTS, INNER, HIDDEN)


def test_biases_and_a_clamped_gate() -> None:
    graph = experts(biased=True, limit=0.5)
    assert insert(graph).fired == 1
    (gate_up,), (down,) = graph.plugins("MoeGateUp"), graph.plugins("MoeDown")
    assert gate_up.attrs == {"activation": "silu", "gated": 1, "limit": 0.5, "alpha": pytest.approx(1.702)}
    assert weight_shape(gate_up.inputs[3]) == (EXPERTS * 2 * INNER,)
    assert weight_shape(down.inputs[4]) == (EXPERTS * HIDDEN,)


@pytest.mark.parametrize("score", ["Softmax", "Sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_other_routers(score: str, bias: bool, groups: int) -> None:
    """The numbers stay: `run_pass` compares them. groups: ranked by so many, 0: there are none"""
    graph = experts(
        score=score, bias=bias, groups=groups > 0, best=groups or 2, total=[("Max", 0.75), ("Add", 0.5)], scale=2.5
    )
    assert insert(graph).fired == 1
    (route,) = graph.plugins("MoeRoute")
    more = {"score": score.lower(), "floor": 0.75, "eps": 0.5, "scale": 2.5, "per_token": 2, "normalized": 1}
    assert route.attrs == {**PLAIN, **more, **({"groups": 3, "group_top": 2, "group_best": groups} if groups else {})}
    assert len(route.inputs) == 1 + bias


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"router": False}, "the router is not a product with a weight"),
        ({"softmax_axis": 1}, "the experts are not taken by a softmax over all, nor by sigmoids"),
        ({"score": "Tanh"}, "the experts are not taken by a softmax over all, nor by sigmoids"),
        ({"bias": True, "keys_as_weights": True}, "the weights go elsewhere than where they come from"),
        ({"bias": True, "gather_axis": 1}, "the weights go elsewhere than where they come from"),
        ({"total": [("Sub", 0.5)]}, "the weights are not divided by their sum"),
        ({"total": [("Add", -0.5)]}, "the weights are not divided by their sum"),
        ({"total": [("Add", 0.5), ("Max", 0.5)]}, "the weights are not divided by their sum"),
        ({"groups": True, "never": -1e9}, "the experts are left out in another way than by groups"),
        ({"groups": True, "marked_axis": 1}, "the experts are left out in another way than by groups"),
        ({"groups": True, "best": 3}, "groups are not ranked by the sum of their one or two best"),
        ({"groups": True, "per_token": 5}, "a row cannot take 5 of 4 experts"),
        ({"largest": 0}, "the experts taken are not a fixed number of the largest"),
        ({"other_experts": True}, "the experts are not taken by a softmax over all, nor by sigmoids"),
        ({"swapped_experts": True}, "the weights go elsewhere than where they come from"),
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
        ({"inner": INNER + 1}, "experts of shapes (6, 10, 8) and (6, 8, 6) do not fit together"),
        ({"biased": True, "bias_shape": (1, 2 * INNER)}, "what is added to the products has shape (1, 1, 10)"),
        ({"limit": 0.5, "up_limit": 0.75}, "gate and up are clamped to different limits"),
        ({"limit": 0.5, "unclamped_share": True}, "the sigmoid is not the gate's"),
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
    assert report.refused == {f"the router is for {EXPERTS - 1} experts, of {EXPERTS}": 1}
