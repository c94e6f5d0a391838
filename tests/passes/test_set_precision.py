"""Types are set where a type is a choice, and nowhere else."""

from ingot.builder.graph import Graph
from ingot.builder.passes import insert_embedding, insert_matmul, recognise_norms
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.set_precision import SetPrecision
from ingot.builder.precision import ProductChoice
from ingot.dtypes import DType, Precision
from ingot.plugins.ref.target import RefTarget
from tests.passes.graphs import GraphMaker


class RoundingTarget(RefTarget):
    """Rounds the inputs of bf16 products."""

    def activations(self, kernel: str) -> str:
        return "bf16" if kernel.startswith("matmul.bf16.") else super().activations(kernel)


def small_graph() -> Graph:
    g = GraphMaker()
    graph = g.finish(g.linear(g.node("RMSNormalization", g.input(), g.weight(8)), 8, 5))
    for each in (insert_embedding, recognise_norms, insert_matmul):
        each.PASS.run(graph)
    return graph


def set_precision(graph: Graph, name: str, activations: str = "bf16", tables: DType = DType.F32) -> PassReport:
    choice = ProductChoice(precision=Precision.parse(name), activations=activations)
    products = {node.name: choice for node in graph.plugins("Matmul")}
    return SetPrecision(products=products, tables=tables, kv=DType.F32, target=RoundingTarget()).run(graph)


def test_products_and_tables() -> None:
    graph = small_graph()
    report = set_precision(graph, "bf16", tables=DType.BF16)
    table, norm, product = graph.nodes
    assert report.fired == 2
    assert table.attrs == {"dtype": "bf16"}
    assert "dtype" not in norm.attrs
    assert (product.attrs["dtype"], product.attrs["activations"]) == ("bf16", "bf16")


def test_float32_is_not_rounded() -> None:
    graph = small_graph()
    set_precision(graph, "f32")
    assert graph.nodes[-1].attrs["activations"] == "f32"
