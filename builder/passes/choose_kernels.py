"""Every plugin gets the kernels that compute it on the target, by name."""

import dataclasses

from ingot.builder.graph import DOMAIN, Graph
from ingot.builder.passes.base import PassReport, Sweep
from ingot.builder.select import choose_kernel, kernel_dtype, plan_ops
from ingot.plugins.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChooseKernels:
    """A plugin that becomes several steps gets the kernel of each."""

    target: Target
    name: str = "choose_kernels"

    def run(self, graph: Graph) -> PassReport:
        """Set the attribute `kernel`."""
        return Sweep(name=self.name, apply=self._apply).run(graph)

    def _apply(self, graph: Graph) -> int:
        nodes = [node for node in graph.nodes if node.domain == DOMAIN]
        for node in nodes:
            activations = node.attrs.get("activations")  # of products alone
            dtype = kernel_dtype(node.attrs.get("dtype", "f32"), activations or "")
            kernels = (
                choose_kernel(self.target, op, "f32" if op == "rope_query" else dtype, activations)
                for op in plan_ops(node.op)
            )
            node.attrs["kernel"] = " ".join(kernels)
        return len(nodes)
