"""A mixture of experts → MoeRoute, MoeGateUp and MoeDown, which compute the experts that a token takes and no others.

x ┬ router ─ what `router_pattern` reads ─ ScatterElements into zeros ─ Transpose ─ Unsqueeze ─── ┐
  └ Unsqueeze ─ MatMul ─ Split ─ activation(gate) * up ─ MatMul ──────────────────────────────── Mul ─ ReduceSum

Experts without gates have no Split, and activate the whole product.
"""

import math

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.graph import (
    DOMAIN,
    Attr,
    Graph,
    is_op,
    optional_input,
    ours,
    producer,
    scalar,
    small_ints,
    weight_shape,
)
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Either, Match, Number, Op, W, X
from ingot.builder.router_pattern import Route, read_fill, read_route
from ingot.plugins.registry import find_op

_SWAPPED = [0, 2, 1]

_SCATTER = Op("ScatterElements", X("zeros"), X("experts"), X("top"), name="scatter")


def _biased(product: Op, name: str) -> Either:
    """A product, with a bias of each expert or without."""
    return Either(Op("Add", product, W(f"{name} bias")), product)


_FIRST = _biased(Op("MatMul", Op("Unsqueeze", X("x"), name="alike"), W("gate_up")), "gate_up")
_UNGATED = Op("Activation", _FIRST, name="activation", domain=DOMAIN)
_SPLIT = Op("Split", _FIRST, name="split")
_PLAIN = Op("Mul", Op("Activation", _SPLIT, name="activation", domain=DOMAIN), X("up"))
_GATE = Op("Min", _SPLIT, Number("limit"), name="gate")
_UP = Op("Max", Op("Min", X("up"), Number("up limit")), Number("least"))
_CLAMPED = Op(
    "Mul",
    Op("Mul", _GATE, Op("Sigmoid", Op("Mul", X("gate input"), Number("alpha")))),
    Op("Add", _UP, Number(value=1.0)),
)
_WEIGHTED = Op(
    "Mul",
    _biased(Op("MatMul", Either(_PLAIN, _CLAMPED, _UNGATED), W("down")), "down"),
    Op("Unsqueeze", Op("Transpose", _SCATTER, name="by_expert"), name="column"),
)


def _stored(weight: gs.Tensor) -> gs.Tensor | None:
    """The weight [experts, out, in] that is multiplied transposed."""
    node = producer(weight)
    if node is None or not is_op(node, "Transpose") or node.attrs.get("perm") != _SWAPPED:
        return None
    return node.inputs[0] if len(weight_shape(weight)) == 3 else None


def _axes(node: gs.Node) -> list[int] | None:
    return small_ints(optional_input(node, 1))


def _check_weights(graph: Graph, match: Match) -> str | None:
    """Which experts are taken, and what they weigh: [batch, sequence, experts]."""
    route = read_route(match["top"], match["experts"])
    if isinstance(route, str):
        return route
    scatter = match["scatter"]
    shaped, fill = read_fill(match["zeros"]) or (None, 1.0)
    if fill or scatter.attrs.get("reduction", "none") != "none":
        return "experts that are not taken weigh something"
    if shaped is not route.shares:
        return "the zeros have another shape than the shares"
    if scatter.attrs.get("axis", 0) not in (-1, 2) or match["by_expert"].attrs.get("perm") != _SWAPPED:
        return "the weights are laid out along another axis"
    return None if ours(producer(route.logits), "Matmul") else "the router is not a product with a weight"


def _check_products(graph: Graph, match: Match) -> str | None:
    """What the experts compute: [batch, experts, sequence, hidden]."""
    parts = 2 if "split" in match.bindings else 1
    gate_up, down = _stored(match["gate_up"]), _stored(match["down"])
    if gate_up is None or down is None:
        return "the experts' weights are not stored [experts, out, in]"
    (experts, rows, _), shape = weight_shape(gate_up), weight_shape(down)
    if shape[0] != experts or parts * shape[2] != rows:
        return f"experts of shapes {weight_shape(gate_up)} and {shape} do not fit together"
    if (reason := _check_halves(match, rows) or _check_gate(match)) is not None:
        return reason
    for name, weight in (("gate_up", gate_up), ("down", down)):
        (bias_experts, ones, columns), bias = (experts, 1, weight_shape(weight)[1]), match.bindings.get(f"{name} bias")
        if bias is not None and weight_shape(bias) != (bias_experts, ones, columns):
            return f"what is added to the products has shape {weight_shape(bias)}"
    if _axes(match["alike"]) != [1] or _axes(match["column"]) not in ([-1], [3]):
        return "the experts are not side by side"
    if _axes(match.root) != [1] or match.root.attrs.get("keepdims", 1):
        return "the sum does not run over the experts"
    return None


def _check_halves(match: Match, rows: int) -> str | None:
    """Gates and ups, where there are gates."""
    if "split" not in match.bindings:
        return None
    split = match["split"]
    if len(split.outputs) != 2 or match["up"] is not split.outputs[1]:
        return "the second factor is not the other half of the product"
    sizes = _axes(split) or [rows // split.attrs.get("num_outputs", 2)] * 2
    if sizes != [rows // 2, rows // 2] or split.attrs.get("axis", 0) not in (-1, 3):
        return f"the parts have sizes {sizes} of {rows}"
    return None


def _check_gate(match: Match) -> str | None:
    """What an expert makes of its gate and up."""
    if "activation" in match.bindings:
        return "the activation has a factor" if len(match["activation"].inputs) > 1 else None
    limits = [scalar(match[name]) or 0.0 for name in ("limit", "up limit", "least")]
    if not limits[0] > 0 or limits != [limits[0], limits[0], -limits[0]]:
        return "gate and up are clamped to different limits"
    if match["gate"] is not producer(match["gate input"]):
        return "the sigmoid is not the gate's"
    return None if (scalar(match["alpha"]) or 0.0) > 0 else "the gate's sigmoid is scaled by nothing above 0"


def _bias(graph: Graph, match: Match, name: str) -> gs.Tensor | None:
    """A bias of each expert's products as one vector."""
    bias = match.bindings.get(f"{name} bias")
    if bias is None:
        return None
    size = graph.constant(np.array([math.prod(weight_shape(bias))], np.int64))
    return graph.insert("Reshape", [bias, size], {}, domain="")[0]


def _check(graph: Graph, match: Match) -> str | None:
    if (reason := _check_weights(graph, match) or _check_products(graph, match)) is not None:
        return reason
    route, experts = _route(match), weight_shape(match["down"])[0]
    rows = weight_shape(route.logits.inputs[0].inputs[1])[0]
    if rows != experts:
        return f"the router is for {rows} experts, of {experts}"
    shapes = ((rows,), None if route.bias is None else weight_shape(route.bias))
    return find_op("moe_route").size_problem(shapes, route.attrs)


def _route(match: Match) -> Route:
    route = read_route(match["top"], match["experts"])
    assert isinstance(route, Route), "the check has said so"
    return route


def _rewrite(graph: Graph, match: Match) -> None:
    route = _route(match)
    ids, weights = graph.insert("MoeRoute", [route.logits, route.bias], route.attrs, outputs=2)
    gate: dict[str, Attr] = {"activation": "silu", "gated": int("split" in match.bindings)}
    if "activation" in match.bindings:
        gate |= {"activation": match["activation"].attrs["activation"]}
    else:
        gate |= {"limit": scalar(match["limit"]) or 0.0, "alpha": scalar(match["alpha"]) or 0.0}
    biases = [_bias(graph, match, name) for name in ("gate_up", "down")]
    made = graph.insert("MoeGateUp", [match["x"], ids, _stored(match["gate_up"]), biases[0]], gate)
    graph.replace(match.output, "MoeDown", [*made, ids, weights, _stored(match["down"]), biases[1]], {})


PASS = Fusion(name="insert_moe", rules=[Rule(pattern=Op("ReduceSum", _WEIGHTED), check=_check, rewrite=_rewrite)])
