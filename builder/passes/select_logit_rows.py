"""The rows whose logits are wanted are gathered as early as rows stay independent of each other: after the last
attention. The rest of the last layer, the last norm and lm_head then run for these rows alone.
"""

import onnx_graphsurgeon as gs

from ingot.builder.graph import Graph, is_op, is_weight, ours, producer
from ingot.builder.passes.base import Sweep
from ingot.builder.select import plan_ops
from ingot.errors import PassError
from ingot.plugins.registry import find_op


def apply(graph: Graph) -> int:
    """Returns how many tensors are gathered."""
    behind = _behind(graph)
    if not behind:
        node = producer(graph.logits)
        raise PassError(
            "the logits do not come from a matmul with a weight",
            where="the graph's output",
            expected="a last norm and lm_head",
            got=f"a {node.op}" if node else "an input of the graph",
            hint=None if node is None or ours(node, node.op) else _no_pass(node.op),
        )
    gathered: dict[int, gs.Variable] = {}
    for node in behind.values():
        for index, tensor in enumerate(node.inputs):
            made_by = producer(tensor)
            if tensor.is_empty() or is_weight(tensor) or (made_by is not None and id(made_by) in behind):
                continue
            if id(tensor) not in gathered:
                gathered[id(tensor)] = graph.insert("GatherRows", [tensor], {})[0]
            graph.set_input(node, index, gathered[id(tensor)])
    return len(gathered)


def _no_pass(op: str) -> str:
    return (
        f"no pass replaces {op} by an op of ingot: convert the model again, or add a pass, that is a file in "
        "builder/passes and a line in builder/pipeline.py, as docs/how-to/add.md says"
    )


def _behind(graph: Graph) -> dict[int, gs.Node]:
    """The nodes of which nobody needs any but the wanted rows: row by row, and so is everyone who reads them."""
    behind: dict[int, gs.Node] = {}
    for node in reversed(graph.nodes):
        if not _row_by_row(node):
            continue
        read = [user for tensor in node.outputs for user in tensor.outputs]
        if all(id(user) in behind for user in read):
            behind[id(node)] = node
    return behind


def _row_by_row(node: gs.Node) -> bool:
    """Whether each row of the result depends on the same row of the inputs alone."""
    if is_op(node, "Add"):
        return not any(map(is_weight, node.inputs))
    return ours(node, node.op) and all(find_op(name).by_rows for name in plan_ops(node.op))


PASS = Sweep(name="select_logit_rows", apply=apply)
