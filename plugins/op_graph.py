"""The builder's rewritten Graph as data, for targets that compile it themselves instead of running the Plan's steps.

Nodes are the graph's own, with the names that the Plan gives them: one node is a whole attention. Weights are named as
in the Plan, which says where their numbers lie; no number is here.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from ingot.plan import Attr, Rows

IDS = "input_ids"  # the input of the graph


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """A tensor [rows, cols] that a node makes."""

    rows: Rows
    cols: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpNode:
    """One op.

    op       as the graph names it: PagedAttention
    inputs   in the op's order: activations, weights of the plan, IDS, or "" where an optional input is absent
    outputs  activations
    attrs    every attribute of the op, with its default where the graph does not say
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpGraph:
    """nodes: each after those that make its inputs; logits: the activation that the graph gives."""

    nodes: tuple[OpNode, ...]
    activations: Mapping[str, Activation]
    logits: str

    def of(self, op: str) -> Iterator[OpNode]:
        """The nodes of one op, in order."""
        return (node for node in self.nodes if node.op == op)

    def weights(self) -> tuple[str, ...]:
        """Names of the weights, each once, in the order of first use."""
        read = (name for node in self.nodes for name in node.inputs if name)
        return tuple(dict.fromkeys(name for name in read if name != IDS and name not in self.activations))
