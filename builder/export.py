"""Graph of plugins → OpGraph, for targets that compile the graph itself (`plugins/op_graph.py`)."""

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Graph, is_weight
from ingot.builder.lower import Lowering
from ingot.builder.select import plan_ops
from ingot.plan import Attr
from ingot.plugins.op_graph import IDS, Activation, OpGraph, OpNode
from ingot.plugins.registry import find_op


def export(graph: Graph, lowering: Lowering) -> OpGraph:
    """lowering: of this graph; it names the weights and knows the sizes of the activations."""
    names: dict[int, str] = {id(graph.ids): IDS}
    activations: dict[str, Activation] = {}
    nodes = []
    for node in graph.nodes:
        if node.domain != DOMAIN:
            continue
        inputs = tuple(_input(lowering, names, node, tensor) for tensor in node.inputs)
        absent = _input_count(node) - len(inputs)
        for index, tensor in enumerate(node.outputs):
            names[id(tensor)] = f"{node.name}/{index}"
            value = lowering.value(tensor)
            activations[names[id(tensor)]] = Activation(rows=value.rows, cols=value.cols)
        nodes.append(
            OpNode(
                name=node.name,
                op=node.op,
                inputs=(*inputs, *[""] * absent),
                outputs=tuple(names[id(tensor)] for tensor in node.outputs),
                attrs=_attrs(node),
            )
        )
    return OpGraph(nodes=tuple(nodes), activations=activations, logits=names[id(graph.logits)])


def _input(lowering: Lowering, names: Mapping[int, str], node: gs.Node, tensor: gs.Tensor) -> str:
    if tensor.is_empty():
        return ""
    return lowering.weight_name(node, tensor) if is_weight(tensor) else names[id(tensor)]


def _input_count(node: gs.Node) -> int:
    """Inputs, the optional ones included. A graph has only the token ids of a step's inputs."""
    first = find_op(plan_ops(node.op)[0])
    return len(first.inputs) - sum(first.inputs[index] != "input_ids" for index in first.batch_inputs)


def _attrs(node: gs.Node) -> dict[str, Attr]:
    """Those of the ops that the plugin stands for."""
    known = {name: default for op in plan_ops(node.op) for name, default in find_op(op).attrs.items()}
    return {name: node.attrs.get(name, default) for name, default in known.items()}
