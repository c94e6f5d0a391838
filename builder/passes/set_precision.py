"""Every product, table and KV cache gets its type; a product also what its input is rounded to on this target."""

import dataclasses

from ingot.builder.graph import Graph, ours
from ingot.builder.passes.base import PassReport, Sweep
from ingot.dtypes import DType
from ingot.plugins.target import Target

PRODUCTS = ("Matmul", "MoeGateUp", "MoeDown")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetPrecision:
    """weights: of products and tables; kv: of the cache."""

    weights: DType
    kv: DType
    target: Target
    name: str = "set_precision"

    def run(self, graph: Graph) -> PassReport:
        """Set the attributes `dtype` and `activations`."""
        return Sweep(name=self.name, apply=self._apply).run(graph)

    def _apply(self, graph: Graph) -> int:
        fired = 0
        for node in graph.nodes:
            if ours(node, *PRODUCTS, "Embedding"):
                node.attrs["dtype"] = self.weights.value
            elif ours(node, "PagedAttention"):
                node.attrs["dtype"] = self.kv.value
            else:
                continue
            if ours(node, *PRODUCTS):
                node.attrs["activations"] = self.target.activations(self.weights.value)
            fired += 1
        return fired
