"""What a node of the graph is, by the specs (`plugins/ops`) of its ops: a new op needs no entry here."""

from collections.abc import Callable

import onnx_graphsurgeon as gs

from ingot.builder.graph import Graph, ours
from ingot.builder.select import plan_ops
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.op import Op
from ingot.plugins.registry import find_op


def specs(node: gs.Node | None) -> tuple[Op, ...]:
    """Those of the plan's ops that a plugin becomes; none for other nodes."""
    return tuple(map(find_op, plan_ops(node.op))) if node is not None and ours(node, node.op) else ()


def _any(node: gs.Node | None, holds: Callable[[Op], object]) -> bool:
    return any(holds(op) for op in specs(node))


def is_product(node: gs.Node | None) -> bool:
    """Whether it multiplies with a packed weight: with one matrix, those of experts or those of heads."""
    return _any(node, lambda op: op.packed is not None)


def is_matmul(node: gs.Node | None) -> bool:
    """Whether it is a product with one matrix."""
    return _any(node, lambda op: op.is_matmul)


def is_of_heads(node: gs.Node | None) -> bool:
    """Whether it multiplies each head with a matrix of its own."""
    return _any(node, lambda op: op.stacked)


def applies_any_function(node: gs.Node | None) -> bool:
    """Whether its attribute `activation` may be any function of the activations."""
    return _any(node, lambda op: "activation" in op.attr_rules and all(map(op.attr_rules["activation"], ACTIVATIONS)))


def is_norm(node: gs.Node | None) -> bool:
    """Whether it norms whole rows, and does nothing else."""
    return _any(node, lambda op: op.norms)


def is_monotone(node: gs.Node | None) -> bool:
    """Whether it changes numbers one by one and keeps their order."""
    return _any(node, lambda op: op.monotone)


def reads_table(node: gs.Node | None) -> bool:
    """Whether it reads single rows of a weight."""
    return _any(node, lambda op: op.tables)


def copies_rows(node: gs.Node | None) -> bool:
    """Whether its output is rows of its input."""
    return _any(node, lambda op: op.copies_rows)


def routes(node: gs.Node | None) -> bool:
    """Whether it chooses experts."""
    return _any(node, lambda op: op.routes)


def attends(node: gs.Node | None) -> bool:
    """Whether tokens read keys and values of those before them."""
    return _any(node, lambda op: op.reads_kv)


def attends_to_latents(node: gs.Node | None) -> bool:
    """Whether tokens read latents of those before them."""
    return _any(node, lambda op: op.reads_kv and op.latent)


def uses_latents(node: gs.Node | None) -> bool:
    """Whether it reads or writes latents."""
    return _any(node, lambda op: op.latent)


def writes_kv(node: gs.Node | None) -> bool:
    """Whether its layer keeps keys and values, or latents, of its own."""
    return _any(node, lambda op: op.writes_kv)


def keeps_state(node: gs.Node | None) -> bool:
    """Whether its layer keeps a state."""
    return _any(node, lambda op: op.state)


def decides(tensor: gs.Tensor, node: gs.Node) -> bool:
    """Whether a node reads a tensor as one that decides: see `Op.decisive`."""
    return any(index < len(node.inputs) and node.inputs[index] is tensor for op in specs(node) for index in op.decisive)


def count_of(graph: Graph, holds: Callable[[gs.Node], bool]) -> int:
    """How many nodes are of a kind."""
    return sum(map(holds, graph.nodes))
