"""Names for steps and weights, from the structure of the graph alone: `layers.3/qkv`, `lm_head`, ..."""

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Graph, ours, producer
from ingot.builder.select import plan_ops

_ONCE = {"Embedding": "embed", "RopeTable": "rope_table", "GatherRows": "logit_rows"}
_NORMS = ("RmsNorm", "LayerNorm")


def name_nodes(graph: Graph) -> None:
    """Set the name of every plugin: its role beside an attention where it has one, else what it does."""
    nodes = [node for node in graph.nodes if node.domain == DOMAIN]
    roles = _roles(graph, nodes)
    used: dict[str, int] = {}
    layer = -1
    for node in nodes:
        if ours(node, "PagedAttention"):
            layer = node.attrs["layer"]
        name = roles.get(id(node)) or _ONCE.get(node.op) or f"layers.{max(layer, 0)}/{_plain_name(node)}"
        used[name] = used.get(name, 0) + 1
        node.name = name if used[name] == 1 else f"{name}.{used[name]}"


def _roles(graph: Graph, nodes: list[gs.Node]) -> dict[int, str]:
    """id of a node → its name, for the nodes beside an attention and those that make the logits."""
    roles: dict[int, str] = {}
    for node in nodes:
        if not ours(node, "PagedAttention"):
            continue
        prefix = f"layers.{node.attrs['layer']}/"
        roles[id(node)] = f"{prefix}attention"
        qkv = producer(node.inputs[0])
        if ours(qkv, "Matmul"):
            assert qkv is not None, "ours says so"
            roles[id(qkv)] = f"{prefix}qkv"
            _name_norm(roles, producer(qkv.inputs[0]), f"{prefix}attention_norm")
        for user in _readers(node.outputs[0]):
            if ours(user, "Matmul"):
                roles[id(user)] = f"{prefix}attention_out"
    head = producer(graph.logits)
    for op, name in (("Softcap", "logit_cap"), ("Scale", "logit_scale")):
        if head is not None and ours(head, op):
            roles[id(head)] = name
            head = producer(head.inputs[0])
    if ours(head, "Matmul"):
        assert head is not None, "ours says so"
        roles[id(head)] = "lm_head"
        _name_norm(roles, producer(head.inputs[0]), "final_norm")
    return roles


def _readers(tensor: gs.Tensor) -> Iterator[gs.Node]:
    """The nodes that read a tensor, or rows of it."""
    for node in tensor.outputs:
        yield from _readers(node.outputs[0]) if ours(node, "GatherRows") else (node,)


def _name_norm(roles: dict[int, str], node: gs.Node | None, name: str) -> None:
    if ours(node, *_NORMS):
        roles.setdefault(id(node), name)


def _plain_name(node: gs.Node) -> str:
    if ours(node, "Matmul"):
        if any(ours(user, "MoeRoute") for user in node.outputs[0].outputs):
            return "moe_router"
        if node.attrs["gated"]:
            return "gate_up"
        return "up" if node.attrs["activation"] != "none" else "down"
    return "mlp_norm" if ours(node, *_NORMS) else plan_ops(node.op)[0]
