"""An activation joins the epilogue of its product; what remains of gating becomes an Activation with a factor."""

from ingot.builder.attention_pattern import read_growth
from ingot.builder.graph import DOMAIN, Graph
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.passes.fuse_gate_up import plain
from ingot.builder.rewrite import Match, Op, W, X

_ACTIVATION = Op("Activation", X("x"), name="activation", domain=DOMAIN)


def _check_factor(graph: Graph, match: Match) -> str | None:
    activation = match["activation"]
    alone = len(activation.inputs) == 1 and graph.users(activation.outputs[0]) == 1
    return None if alone else "the activation is used elsewhere"


def _rewrite_factor(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Activation", [match["x"], match["factor"]], dict(match["activation"].attrs))


def _check_gating(graph: Graph, match: Match) -> str | None:
    if read_growth(graph, match.output)[0] is not match.output:
        return "queries grow with their position"
    return "a square is not a gate" if match["a"] is match["b"] else None


def _rewrite_gating(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Activation", [match["a"], match["b"]], {"activation": "none"})


def _check_epilogue(graph: Graph, match: Match) -> str | None:
    if len(match.root.inputs) > 1:
        return "the activation has a factor"
    return None if plain(graph, match["product"]) else "the product is used elsewhere or has an epilogue"


def _rewrite_epilogue(graph: Graph, match: Match) -> None:
    product = match["product"]
    graph.replace(match.output, "Matmul", product.inputs, {**product.attrs, **match.root.attrs})


_PRODUCT = Op("Matmul", X("x"), W("weight"), name="product", domain=DOMAIN)

PASS = Fusion(
    name="fuse_activation",
    rules=[
        Rule(pattern=Op("Mul", _ACTIVATION, X("factor")), check=_check_factor, rewrite=_rewrite_factor),
        Rule(pattern=Op("Mul", X("a"), X("b")), check=_check_gating, rewrite=_rewrite_gating),
        Rule(pattern=Op("Activation", _PRODUCT, domain=DOMAIN), check=_check_epilogue, rewrite=_rewrite_epilogue),
    ],
)
