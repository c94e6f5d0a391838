"""activation(gate product) * up product of the same input → one gated Matmul.

Also where gate and up are the two halves of one product.
"""

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Graph, optional_input, small_ints, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Op, W, X


def joined(graph: Graph, products: list[gs.Node]) -> list[gs.Tensor | None]:
    """Weight [sum N, K] and bias of several Matmuls as one; an absent bias beside present ones counts as zeros."""
    weight = graph.insert("Concat", [product.inputs[1] for product in products], {"axis": 0}, domain="")[0]
    biases = [optional_input(product, 2) for product in products]
    if not any(bias is not None for bias in biases):
        return [weight, None]
    filled = [
        graph.constant(np.zeros(weight_shape(product.inputs[1])[0], np.float32)) if bias is None else bias
        for product, bias in zip(products, biases, strict=True)
    ]
    return [weight, graph.insert("Concat", filled, {"axis": 0}, domain="")[0]]


def plain(graph: Graph, product: gs.Node) -> bool:
    """Whether a Matmul has no epilogue but a bias, and one user."""
    return (
        product.attrs["activation"] == "none"
        and not product.attrs["gated"]
        and optional_input(product, 3) is None
        and graph.users(product.outputs[0]) == 1
    )


def _check_two(graph: Graph, match: Match) -> str | None:
    gate, up, activation = match["gate"], match["up"], match["activation"]
    if len(activation.inputs) > 1 or graph.users(activation.outputs[0]) > 1:
        return "the activation is used elsewhere"
    if gate is up or not (plain(graph, gate) and plain(graph, up)):
        return "gate or up is used elsewhere or has an epilogue"
    shapes = weight_shape(gate.inputs[1]), weight_shape(up.inputs[1])
    return None if shapes[0] == shapes[1] else f"gate {shapes[0]} and up {shapes[1]} differ in shape"


def _rewrite_two(graph: Graph, match: Match) -> None:
    inputs = [match["x"], *joined(graph, [match["gate"], match["up"]])]
    graph.replace(match.output, "Matmul", inputs, {**match["activation"].attrs, "gated": 1})


def _check_halves(graph: Graph, match: Match) -> str | None:
    split, product, activation = match["split"], match["product"], match["activation"]
    if len(split.outputs) != 2 or match["up"] is not split.outputs[1]:
        return "the second factor is not the other half of the product"
    users = [graph.users(tensor) for tensor in (*split.outputs, activation.outputs[0])]
    if users != [1, 1, 1] or not plain(graph, product):
        return "a part of the product is used elsewhere"
    rows = weight_shape(product.inputs[1])[0]
    sizes = small_ints(optional_input(split, 1)) or [rows // split.attrs.get("num_outputs", 2)] * 2
    return None if sizes == [rows // 2, rows // 2] else f"the parts have sizes {sizes} of {rows}"


def _rewrite_halves(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Matmul", match["product"].inputs, {**match["activation"].attrs, "gated": 1})


def _product(name: str) -> Op:
    return Op("Matmul", X("x"), W(f"{name} weight"), name=name, domain=DOMAIN)


_SPLIT = Op("Split", Op("Matmul", X("x"), W("weight"), name="product", domain=DOMAIN), name="split")

PASS = Fusion(
    name="fuse_gate_up",
    rules=[
        Rule(
            pattern=Op("Mul", Op("Activation", _product("gate"), name="activation", domain=DOMAIN), _product("up")),
            check=_check_two,
            rewrite=_rewrite_two,
        ),
        Rule(
            pattern=Op("Mul", Op("Activation", _SPLIT, name="activation", domain=DOMAIN), X("up")),
            check=_check_halves,
            rewrite=_rewrite_halves,
        ),
    ],
)
