"""MatMul with a weight, and the Add of a bias after it → Matmul, whose weight is [N, K]."""

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Attr, Graph, is_op, producer, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Op, W, X

PLAIN: Mapping[str, Attr] = {"activation": "none", "gated": 0}


def _check_product(graph: Graph, match: Match) -> str | None:
    ndim = len(weight_shape(match["weight"]))
    return None if ndim == 2 else f"its weight has {ndim} dimensions"


def _rewrite_product(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Matmul", [match["x"], _transposed(graph, match["weight"])], PLAIN)


def _transposed(graph: Graph, weight: gs.Tensor) -> gs.Tensor:
    """The [K, N] weight as [N, K]; two transposes in a row vanish."""
    node = producer(weight)
    if is_op(node, "Transpose"):
        assert node is not None, "is_op says so"
        return node.inputs[0]
    return graph.insert("Transpose", [weight], {"perm": [1, 0]}, domain="")[0]


def _check_bias(graph: Graph, match: Match) -> str | None:
    product = match["product"]
    if graph.users(product.outputs[0]) > 1:
        return "the product is also used without this bias"
    if len(product.inputs) > 2:
        return "the product has a bias already"
    if product.attrs["activation"] != "none":
        return "the product already ends in an activation"
    rows, shape = weight_shape(product.inputs[1])[0], weight_shape(match["bias"])
    return None if shape == (rows,) else f"what is added has shape {shape}, not ({rows},)"


def _rewrite_bias(graph: Graph, match: Match) -> None:
    product = match["product"]
    graph.replace(match.output, "Matmul", [*product.inputs, match["bias"]], dict(product.attrs))


PASS = Fusion(
    name="insert_matmul",
    rules=[
        Rule(pattern=Op("MatMul", X("x"), W("weight")), check=_check_product, rewrite=_rewrite_product),
        Rule(
            pattern=Op("Add", Op("Matmul", X("x"), W("weight"), name="product", domain=DOMAIN), W("bias")),
            check=_check_bias,
            rewrite=_rewrite_bias,
        ),
    ],
)
