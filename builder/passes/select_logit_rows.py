"""The rows whose logits are wanted are gathered before the last norm and lm_head, which then run for them alone."""

from ingot.builder.graph import Graph, ours, producer
from ingot.builder.passes.base import Sweep
from ingot.errors import PassError

_ROW_BY_ROW = (
    "Matmul",
    "RmsNorm",
    "LayerNorm",
    "Activation",
    "Softcap",
)  # each result row depends on the same row of input 0


def apply(graph: Graph) -> int:
    """Walk from the logits towards the inputs while every op works row by row on one activation."""
    last = None
    tensor = graph.logits
    while (node := producer(tensor)) is not None and ours(node, *_ROW_BY_ROW) and graph.users(tensor) == 1:
        last, tensor = node, node.inputs[0]
    if last is None:
        raise PassError(
            "the logits do not come from a product with a weight",
            where="the graph's output", expected="a last norm and lm_head",
            got=f"a {node.op}" if node else "an input of the graph",
        )  # fmt: skip
    graph.set_input(last, 0, graph.insert("GatherRows", [tensor], {})[0])
    return 1


PASS = Sweep(name="select_logit_rows", apply=apply)
