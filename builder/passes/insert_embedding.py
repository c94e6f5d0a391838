"""Gather of a table by the token ids → Embedding; its scaling and the addition of learned positions join it.

Where a product widens the rows of a narrow table before positions are added, the table becomes that of the products.
"""

import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Graph, scalar, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.passes.insert_matmul import PLAIN
from ingot.builder.positions import position_count
from ingot.builder.rewrite import Either, Match, Number, Op, W, X

_FLOAT = 1  # ONNX's number of float32


def _check_table(graph: Graph, match: Match) -> str | None:
    if match["ids"] is not graph.ids:
        return "it is not indexed by the token ids"
    if match.root.attrs.get("axis", 0) != 0 or len(weight_shape(match["table"])) != 2:
        return "it does not gather rows of a table"
    return None


def _rewrite_table(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Embedding", [match["ids"], match["table"]], {})


def _check_cast(graph: Graph, match: Match) -> str | None:
    return None if match.root.attrs["to"] == _FLOAT else "embeddings are cast to something other than float32"


def _rewrite_cast(graph: Graph, match: Match) -> None:
    graph.redirect(match.output, match.root.inputs[0])


def _check_scale(graph: Graph, match: Match) -> str | None:
    embedding = match["embedding"]
    if "scale" in embedding.attrs or len(embedding.inputs) > 2:
        return "the embedding is scaled already, or holds positions too"
    return None if graph.users(embedding.outputs[0]) == 1 else "the embedding is also used unscaled"


def _rewrite_scale(graph: Graph, match: Match) -> None:
    scale = scalar(match["scale"])
    assert scale is not None, "the pattern asks for a number"
    graph.replace(match.output, "Embedding", match["embedding"].inputs, {"scale": scale})


def _check_positions(graph: Graph, match: Match) -> str | None:
    if (misfit := _misfit(graph, match, weight_shape(match["table"])[1])) is not None:
        return misfit
    return None if graph.users(match["embedding"].outputs[0]) == 1 else "the token embedding is used elsewhere"


def _misfit(graph: Graph, match: Match, width: int) -> str | None:
    """Why the second table cannot be a table of positions of that width."""
    if position_count(graph, match["positions"]) is None:
        return "the second table is not indexed by positions"
    shape = weight_shape(match["position_table"])
    if match["gather"].attrs.get("axis", 0) != 0 or len(shape) != 2 or shape[1] != width:
        return f"a table of shape {shape} does not fit one of {width} columns"
    return None


def _rewrite_positions(graph: Graph, match: Match) -> None:
    _with_positions(graph, match, match["table"])


def _with_positions(graph: Graph, match: Match, table: gs.Tensor) -> None:
    count = position_count(graph, match["positions"])
    assert count is not None, "check has seen it"
    rows = weight_shape(match["position_table"])[0]
    attrs = {**match["embedding"].attrs, "positions": min(count, rows)}
    graph.replace(match.output, "Embedding", [match["ids"], table, match["position_table"]], attrs)


def _check_widened(graph: Graph, match: Match) -> str | None:
    widened = match["widened"]
    if len([each for each in widened.inputs if not each.is_empty()]) > 2 or dict(widened.attrs) != PLAIN:
        return "the product of the embedding has a bias or an activation"
    if "scale" in match["embedding"].attrs or len(match["embedding"].inputs) > 2:
        return "the embedding is scaled already, or holds positions too"
    if graph.users(widened.outputs[0]) > 1:
        return "the token embedding is used elsewhere"
    return _misfit(graph, match, weight_shape(match["weight"])[0])


def _rewrite_widened(graph: Graph, match: Match) -> None:
    table, weight = match["table"], match["weight"]  # [vocab, narrow], [hidden, narrow]
    transposed = graph.insert("Transpose", [weight], {"perm": [1, 0]}, domain="")[0]
    _with_positions(graph, match, graph.insert("MatMul", [table, transposed], {}, domain="")[0])


_EMBEDDING = Op("Embedding", X("ids"), W("table"), name="embedding", domain=DOMAIN)
_POSITIONS = Op("Gather", W("position_table"), X("positions"), name="gather")

_WIDENED = Op("Matmul", _EMBEDDING, W("weight"), name="widened", domain=DOMAIN)

PASS = Fusion(
    name="insert_embedding",
    rules=[
        Rule(pattern=Op("Gather", W("table"), X("ids")), check=_check_table, rewrite=_rewrite_table),
        Rule(
            pattern=Op("Cast", Op("Embedding", X("ids"), W("table"), domain=DOMAIN)),
            check=_check_cast,
            rewrite=_rewrite_cast,
        ),
        Rule(pattern=Op("Mul", _EMBEDDING, Number("scale")), check=_check_scale, rewrite=_rewrite_scale),
        Rule(
            pattern=Op("Add", _WIDENED, Either(_POSITIONS, Op("Cast", _POSITIONS))),
            check=_check_widened,
            rewrite=_rewrite_widened,
        ),
        Rule(
            pattern=Op("Add", _EMBEDDING, Either(_POSITIONS, Op("Cast", _POSITIONS))),
            check=_check_positions,
            rewrite=_rewrite_positions,
        ),
    ],
)
