"""The products before an Attention, three, or two where keys are values as well → one product and a Split."""

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.attention_pattern import read_growth, read_side
from ingot.builder.graph import Graph, is_op, ours, producer, weight_shape
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.passes.fuse_gate_up import joined, plain
from ingot.builder.passes.insert_matmul import PLAIN
from ingot.builder.rewrite import Match, Op, X
from ingot.builder.sink_pattern import without_sink


def _sources(graph: Graph, match: Match) -> list[gs.Tensor] | str:
    sources = []
    for tensor in (read_growth(graph, match["q"])[0], match["k"], match["v"]):
        side = read_side(graph, without_sink(tensor))
        if isinstance(side, str):
            return side
        sources.append(side.source)
    return sources


def _check(graph: Graph, match: Match) -> str | None:
    sources = _sources(graph, match)
    if isinstance(sources, str):
        return sources
    products = [producer(tensor) for tensor in sources]
    if all(is_op(product, "Split") for product in products):
        return "q, k and v are one product already"
    if all(is_op(product, "Split") for product in products[1:]):
        return "k and v are those of another layer"
    if not all(ours(product, "Matmul") for product in products):
        return "q, k or v is not a product with a weight"
    if any(product.inputs[0] is not products[0].inputs[0] for product in products if product and products[0]):
        return "q, k and v are products of different inputs"
    return _used_elsewhere(graph, products)


def _used_elsewhere(graph: Graph, products: list[gs.Node | None]) -> str | None:
    q, k, v = products
    alone = [each for each in (q, *((k,) if v is k else (k, v))) if each is not None]
    wrong = q is k or q is v or not all(plain(graph, each) for each in alone)
    return "q, k or v is used elsewhere or has an epilogue" if wrong else None


def _rewrite(graph: Graph, match: Match) -> None:
    sources = _sources(graph, match)
    assert not isinstance(sources, str), "check has read them"
    sources = list({id(each): each for each in sources}.values())
    products = [tensor.inputs[0] for tensor in sources]
    sizes = np.array([weight_shape(product.inputs[1])[0] for product in products], np.int64)
    merged = graph.insert("Matmul", [products[0].inputs[0], *joined(graph, products)], PLAIN)
    parts = graph.insert("Split", [*merged, graph.constant(sizes)], {"axis": -1}, domain="", outputs=len(sources))
    for old, new in zip(sources, parts, strict=True):
        graph.redirect(old, new)


PASS = Fusion(
    name="merge_qkv", rules=[Rule(pattern=Op("Attention", X("q"), X("k"), X("v")), check=_check, rewrite=_rewrite)]
)
