"""An activation times or over a number → Scale. After the passes to which such a product is part of something else."""

from ingot.builder.graph import Graph, scalar
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Number, Op, X


def _check(graph: Graph, match: Match) -> str | None:
    return None if scalar(match["factor"]) else "the factor is 0"


def _rewrite_product(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Scale", [match["x"]], {"factor": scalar(match["factor"]) or 0.0})


def _rewrite_quotient(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Scale", [match["x"]], {"factor": 1 / (scalar(match["factor"]) or 1.0)})


PASS = Fusion(
    name="insert_scale",
    rules=[
        Rule(pattern=Op("Mul", X("x"), Number("factor")), check=_check, rewrite=_rewrite_product),
        Rule(pattern=Op("Div", X("x"), Number("factor")), check=_check, rewrite=_rewrite_quotient),
    ],
)
