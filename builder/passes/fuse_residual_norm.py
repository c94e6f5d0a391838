"""The addition before a norm joins it: the norm takes branch and residual stream, and gives their sum as well."""

import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Graph, optional_input, producer
from ingot.builder.node_kinds import copies_rows, specs
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Op, W, X
from ingot.builder.select import plugin_of
from ingot.plugins.registry import find_op, op_names


def _residual(norm: gs.Node) -> int:
    """Index of the input."""
    (op,) = specs(norm)
    assert op.residual is not None, "it is a norm"
    return op.residual


def _check(graph: Graph, match: Match) -> str | None:
    if optional_input(match.root, _residual(match.root)) is not None:
        return "the norm has a residual already"
    return "both summands are the same" if match["a"] is match["b"] else None


def _rewrite(graph: Graph, match: Match) -> None:
    """The norm's second output takes the place of the Add's, for everyone else who reads the stream."""
    norm, add = match.root, match["add"]
    stream, branch = sorted([match["a"], match["b"]], key=lambda each: _age(graph, each))  # the stream is older
    inputs = [branch, *(optional_input(norm, index) for index in range(1, _residual(norm))), stream]
    total = add.outputs[0]
    made = graph.replace(match.output, norm.op, inputs, dict(norm.attrs))
    if graph.users(total):
        graph.move_output(total, made)


def _age(graph: Graph, tensor: gs.Tensor) -> int:
    """When a tensor was computed; rows taken out of one are as old as it."""
    node = producer(tensor)
    return _age(graph, node.inputs[0]) if node is not None and copies_rows(node) else graph.age(tensor)


_ADD = Op("Add", X("a"), X("b"), name="add")

PASS = Fusion(
    name="fuse_residual_norm",
    rules=[
        Rule(pattern=Op(plugin_of(name), _ADD, W("weight"), domain=DOMAIN), check=_check, rewrite=_rewrite)
        for name in op_names()
        if find_op(name).norms
    ],
)
