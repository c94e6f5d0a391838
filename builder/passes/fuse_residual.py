"""An addition that no norm took joins the epilogue of its product; what is left becomes Add."""

from ingot.builder.graph import DOMAIN, Graph, optional_input
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Op, W, X


def _check_epilogue(graph: Graph, match: Match) -> str | None:
    product = match["product"]
    if optional_input(product, 3) is not None:
        return "the product has a residual already"
    return None if graph.users(product.outputs[0]) == 1 else "the product is also used without the residual"


def _rewrite_epilogue(graph: Graph, match: Match) -> None:
    product = match["product"]
    inputs = [*product.inputs[:2], optional_input(product, 2), match["residual"]]
    graph.replace(match.output, "Matmul", inputs, dict(product.attrs))


def _always(graph: Graph, match: Match) -> str | None:
    return None


def _rewrite_add(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Add", [match["a"], match["b"]], {})


_PRODUCT = Op("Matmul", X("x"), W("weight"), name="product", domain=DOMAIN)

PASS = Fusion(
    name="fuse_residual",
    rules=[
        Rule(pattern=Op("Add", _PRODUCT, X("residual")), check=_check_epilogue, rewrite=_rewrite_epilogue),
        Rule(pattern=Op("Add", X("a"), X("b")), check=_always, rewrite=_rewrite_add),
    ],
)
