"""A mixture of experts → MoeRoute, MoeGateUp and MoeDown, which compute the experts that a token takes and no others.

x ┬ router ─ Softmax ─ TopK ─ [/ their sum] ─ ScatterElements into zeros ─ Transpose ─ Unsqueeze ┐
  └ Unsqueeze ─ MatMul ─ Split ─ activation(gate) * up ─ MatMul ──────────────────────────────── Mul ─ ReduceSum
"""

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Attr, Graph, is_op, optional_input, ours, producer, small_ints, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Either, Match, Op, W, X

_SWAPPED = [0, 2, 1]

_SCATTER = Op(
    "ScatterElements",
    Op("ConstantOfShape", Op("Shape", X("shaped"), name="shape"), name="zeros"),
    X("experts"),
    Either(Op("Div", X("top"), Op("ReduceSum", X("top"), name="total"), name="normalized"), X("top")),
    name="scatter",
)
_SPLIT = Op("Split", Op("MatMul", Op("Unsqueeze", X("x"), name="alike"), W("gate_up")), name="split")
_GATED = Op("Mul", Op("Activation", _SPLIT, name="activation", domain=DOMAIN), X("up"))
_WEIGHTED = Op(
    "Mul", Op("MatMul", _GATED, W("down")), Op("Unsqueeze", Op("Transpose", _SCATTER, name="by_expert"), name="column")
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
    top = producer(match["top"])
    if top is None or not is_op(top, "TopK") or match["top"] is not top.outputs[0]:
        return "the weights are not the largest of some"
    if match["experts"] is not top.outputs[1]:
        return "the weights go elsewhere than where they come from"
    if top.attrs.get("axis", -1) not in (-1, 2) or not top.attrs.get("largest", 1) or len(_axes(top) or []) != 1:
        return "the experts taken are not a fixed number of the largest"
    softmax = producer(top.inputs[0])
    if softmax is None or not is_op(softmax, "Softmax") or softmax.attrs.get("axis", -1) not in (-1, 2):
        return "the experts are not taken by a softmax over all"
    if match["shaped"] is not softmax.outputs[0] or len(match["shape"].attrs):
        return "the zeros have another shape than the softmax"
    zero = match["zeros"].attrs.get("value")
    scatter, total = match["scatter"], match.bindings.get("total")
    if (zero is not None and np.any(zero.values)) or scatter.attrs.get("reduction", "none") != "none":
        return "experts that are not taken weigh something"
    if scatter.attrs.get("axis", 0) not in (-1, 2) or match["by_expert"].attrs.get("perm") != _SWAPPED:
        return "the weights are laid out along another axis"
    if total is not None and (_axes(total) not in ([-1], [2]) or not total.attrs.get("keepdims", 1)):
        return "the weights are not divided by their sum"
    return None if ours(producer(softmax.inputs[0]), "Matmul") else "the router is no product with a weight"


def _check_products(graph: Graph, match: Match) -> str | None:
    """What the experts compute: [batch, experts, sequence, hidden]."""
    split, activation = match["split"], match["activation"]
    gate_up, down = _stored(match["gate_up"]), _stored(match["down"])
    if gate_up is None or down is None:
        return "the experts' weights are not stored [experts, out, in]"
    (experts, rows, _), shape = weight_shape(gate_up), weight_shape(down)
    if shape[0] != experts or 2 * shape[2] != rows:
        return f"experts of shapes {weight_shape(gate_up)} and {shape} do not fit together"
    if len(activation.inputs) > 1 or len(split.outputs) != 2 or match["up"] is not split.outputs[1]:
        return "the second factor is not the other half of the product"
    sizes = _axes(split) or [rows // split.attrs.get("num_outputs", 2)] * 2
    if sizes != [rows // 2, rows // 2] or split.attrs.get("axis", 0) not in (-1, 3):
        return f"the parts have sizes {sizes} of {rows}"
    if _axes(match["alike"]) != [1] or _axes(match["column"]) not in ([-1], [3]):
        return "the experts are not side by side"
    if _axes(match.root) != [1] or match.root.attrs.get("keepdims", 1):
        return "the sum does not run over the experts"
    return None


def _route(match: Match) -> tuple[gs.Tensor, int]:
    """The router's logits, and how many experts a token takes."""
    top = match["top"].inputs[0]
    (taken,) = _axes(top) or [0]
    return top.inputs[0].inputs[0].inputs[0], taken


def _check(graph: Graph, match: Match) -> str | None:
    if (reason := _check_weights(graph, match) or _check_products(graph, match)) is not None:
        return reason
    logits, taken = _route(match)
    rows, experts = weight_shape(logits.inputs[0].inputs[1])[0], weight_shape(match["down"])[0]
    return None if 1 <= taken <= rows == experts else f"{taken} of {rows} are taken, of {experts} experts"


def _rewrite(graph: Graph, match: Match) -> None:
    logits, taken = _route(match)
    route: dict[str, Attr] = {"per_token": taken, "normalized": int("normalized" in match.bindings)}
    ids, weights = graph.insert("MoeRoute", [logits], route, outputs=2)
    activation: dict[str, Attr] = {"activation": match["activation"].attrs["activation"]}
    made = graph.insert("MoeGateUp", [match["x"], ids, _stored(match["gate_up"])], activation)
    graph.replace(match.output, "MoeDown", [*made, ids, weights, _stored(match["down"])], {})


PASS = Fusion(name="insert_moe", rules=[Rule(pattern=Op("ReduceSum", _WEIGHTED), check=_check, rewrite=_rewrite)])
