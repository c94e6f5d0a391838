"""Every product, table and KV cache gets its type; a product also what its input is rounded to on this target."""

import dataclasses
from collections.abc import Mapping

import onnx_graphsurgeon as gs

from ingot.builder.graph import Graph, weight_shape
from ingot.builder.node_kinds import attends, is_product, reads_table, uses_latents, writes_kv
from ingot.builder.passes.base import PassReport, Sweep
from ingot.builder.precision import ProductChoice, product_weight
from ingot.builder.select import choose_kernel, plan_ops
from ingot.dtypes import KV_CODES, DType
from ingot.errors import BuildError
from ingot.plugins.quantised import MAX_K
from ingot.plugins.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetPrecision:
    """products: by name, with activations that are decided; tables: of tokens and positions; kv: of the cache."""

    products: Mapping[str, ProductChoice]
    tables: DType
    kv: DType
    target: Target
    name: str = "set_precision"

    def run(self, graph: Graph) -> PassReport:
        """Set the attributes `dtype`, `group` and `activations`."""
        return Sweep(name=self.name, apply=self._apply).run(graph)

    def _apply(self, graph: Graph) -> int:
        fired = 0
        for node in graph.nodes:
            if is_product(node):
                choice = self.products[node.name]
                dtype = choice.precision.dtype.value
                rounded = self._rounded(node, choice)
                _check_depth(node.name, weight_shape(product_weight(node))[-1], rounded)
                node.attrs |= {"dtype": dtype, "group": choice.precision.group, "activations": rounded}
            elif reads_table(node):
                node.attrs["dtype"] = self.tables.value
            elif attends(node) or writes_kv(node):
                if uses_latents(node):
                    _check_latent(node.name, self.kv)
                node.attrs["dtype"] = self.kv.value
            else:
                continue
            fired += 1
        return fired

    def _rounded(self, node: gs.Node, choice: ProductChoice) -> str:
        """bf16 stands for what the target's best kernel makes of it."""
        if choice.activations != "bf16":
            return choice.activations
        (op,) = plan_ops(node.op)
        return self.target.activations(choose_kernel(self.target, op, choice.precision.dtype.value))


def _check_latent(name: str, kv: DType) -> None:
    if kv in KV_CODES:
        raise BuildError(
            "a KV cache of 8 bits is not supported for latent attention: one scale for each row loses too much",
            where=name,
            expected="bf16 or f32",
            got=kv.value,
            hint="leave --kv_cache_dtype out: a latent is small already",
        )


def _check_depth(name: str, k: int, rounded: str) -> None:
    if rounded == "int8" and k > MAX_K:
        raise BuildError(
            "a matmul has too many columns for int8 activations: its sums could overflow int32",
            where=name,
            expected=f"at most {MAX_K} columns",
            got=str(k),
            hint="give this layer activations bf16 in a recipe",
        )
