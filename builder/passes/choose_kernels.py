"""Every plugin gets the kernels that compute it on the target, by name."""

import dataclasses

from ingot.builder.graph import DOMAIN, Graph, ours
from ingot.builder.passes.base import PassReport, Sweep
from ingot.builder.select import ATTENTIONS, choose_kernel, kernel_dtype, plan_ops, rounds_nothing
from ingot.plugins.registry import find_op
from ingot.plugins.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChooseKernels:
    """A plugin that becomes several steps gets the kernel of each. exact: attention rounds nothing that it need not."""

    target: Target
    exact: bool = False
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
                self._kernel(op, dtype if find_op(op).by_dtype else "f32", activations, ours(node, *ATTENTIONS))
                for op in plan_ops(node.op)
            )
            node.attrs["kernel"] = " ".join(kernels)
        return len(nodes)

    def _kernel(self, op: str, dtype: str, activations: str | None, attends: bool) -> str:
        if attends and self.exact and rounds_nothing(self.target, op, dtype):
            activations = "f32"
        return choose_kernel(self.target, op, dtype, activations)
