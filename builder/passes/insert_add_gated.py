"""a + b * Sigmoid(gate), where a row has one gate → AddGated: what an expert that all tokens share adds."""

from ingot.builder.graph import DOMAIN, Graph, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Op, W, X


def _check(graph: Graph, match: Match) -> str | None:
    rows = weight_shape(match["product"].inputs[1])[0]
    if rows != 1:
        return f"the gate has {rows} columns"
    alone = graph.users(match["gated"].outputs[0]) == 1
    return None if alone else "what is gated is used elsewhere"


def _rewrite(graph: Graph, match: Match) -> None:
    gate = match["product"].outputs[0]
    graph.replace(match.output, "AddGated", [match["a"], match["b"], gate], {})


_GATE = Op("Sigmoid", Op("Matmul", X("x"), W("weight"), name="product", domain=DOMAIN))

PASS = Fusion(
    name="insert_add_gated",
    rules=[Rule(pattern=Op("Add", X("a"), Op("Mul", X("b"), _GATE, name="gated")), check=_check, rewrite=_rewrite)],
)
