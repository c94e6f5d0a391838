"""Names for steps and weights, from the structure of the graph alone: `layers.3/qkv`, `lm_head`, ..."""

from collections.abc import Iterator, Mapping

import onnx_graphsurgeon as gs

from ingot.builder.graph import DOMAIN, Graph, ours, producer
from ingot.builder.node_kinds import (
    attends,
    attends_to_latents,
    copies_rows,
    decides,
    is_matmul,
    is_norm,
    keeps_state,
    reads_table,
    routes,
    specs,
)
from ingot.builder.select import ATTENTIONS, plan_ops


def name_nodes(graph: Graph) -> None:
    """Set the name of every plugin: its role beside an attention where it has one, else what it does."""
    nodes = [node for node in graph.nodes if node.domain == DOMAIN]
    mixers = _mixers(nodes)
    roles = _roles(graph, mixers)
    used: dict[str, int] = {}
    layer = -1
    for node in nodes:
        layer = max(layer, mixers.get(id(node), (0, node))[0])
        name = (
            roles.get(id(node))
            or _step_name(node)
            or _of_embeddings(node)
            or f"layers.{max(layer, 0)}/{_plain_name(node)}"
        )
        used[name] = used.get(name, 0) + 1
        node.name = name if used[name] == 1 else f"{name}.{used[name]}"


def _step_name(node: gs.Node) -> str:
    """The name of a step that a plan needs but once, outside of its layers."""
    return next((op.step_name for op in specs(node) if op.step_name), "")


def _of_embeddings(node: gs.Node) -> str:
    """The name of a norm of the embeddings, which layers read; that of an MLP in the first layer is read by products
    alone."""
    table = producer(_unscaled(node.inputs[0])) if is_norm(node) else None
    normed = any(is_norm(user) for user in node.outputs[0].outputs)
    return "embedding_norm" if table is not None and reads_table(table) and normed else ""


def _mixers(nodes: list[gs.Node]) -> dict[int, tuple[int, gs.Node]]:
    """id of a node that mixes tokens → the number of its layer, and the node: an attention, linear or not, or a
    convolution that stands by itself. Those that begin with the same norm are in one layer."""
    found: dict[int, tuple[int, gs.Node]] = {}
    layers: dict[int, int] = {}
    for node in nodes:
        if (attends(node) or keeps_state(node)) and not any(map(keeps_state, node.outputs[0].outputs)):
            found[id(node)] = layers.setdefault(id(_input_of(node)), len(layers)), node
    return found


def _input_of(mixer: gs.Node) -> gs.Tensor:
    """What the products read that a mixer begins with."""
    tensor = mixer.inputs[0]
    while (node := producer(tensor)) is not None and not (is_norm(node) or reads_table(node)):
        tensor = node.inputs[0]
        if is_matmul(node):
            break
    return _unscaled(tensor)


def _unscaled(tensor: gs.Tensor) -> gs.Tensor:
    """What a factor scales: attention and Mamba 2 of one layer may read their norm through factors of their own."""
    node = producer(tensor)
    return node.inputs[0] if node is not None and ours(node, "Scale") else tensor


def _roles(graph: Graph, mixers: Mapping[int, tuple[int, gs.Node]]) -> dict[int, str]:
    """id of a node → its name, for the nodes beside an attention and those that make the logits."""
    roles: dict[int, str] = {}
    for layer, node in mixers.values():
        prefix = f"layers.{layer}/"
        if ours(node, *ATTENTIONS):
            _name_attention(roles, node, prefix)
        elif attends_to_latents(node):
            _name_latent(roles, node, prefix)
        elif ours(node, "LinearAttention"):
            _name_linear(roles, node, f"{prefix}linear_")
        else:
            _name_conv(roles, node, f"{prefix}conv")
    head = producer(graph.logits)
    for op, name in (("Softcap", "logit_cap"), ("Scale", "logit_scale")):
        if head is not None and ours(head, op):
            roles[id(head)] = name
            head = producer(head.inputs[0])
    if is_matmul(head):
        assert head is not None, "it is one"
        roles[id(head)] = "lm_head"
        _name_norm(roles, producer(head.inputs[0]), "final_norm")
    return roles


def _name_attention(roles: dict[int, str], node: gs.Node, prefix: str) -> None:
    roles[id(node)] = f"{prefix}attention"
    _name_product(roles, node.inputs[0], f"{prefix}qkv", f"{prefix}attention_norm")
    for user in _readers(node.outputs[0]):
        if ours(user, "SigmoidGate"):
            roles[id(user)] = f"{prefix}attention_gated"
            _name_product(roles, user.inputs[1], f"{prefix}attention_gate", "")
            user = next(_readers(user.outputs[0]), user)
        if is_norm(user):
            roles[id(user)] = f"{prefix}attention_inner_norm"
            user = next(_readers(user.outputs[0]), user)
        if is_matmul(user):
            roles[id(user)] = f"{prefix}attention_out"


def _name_latent(roles: dict[int, str], node: gs.Node, prefix: str) -> None:
    roles[id(node)] = f"{prefix}attention"
    absorb = node.inputs[0].inputs[0]
    write = absorb.inputs[0].inputs[0]
    roles |= {id(absorb): f"{prefix}attention_keys", id(write): f"{prefix}latent_kv_write"}
    _name_product(roles, write.inputs[1], f"{prefix}latent", f"{prefix}attention_norm")
    query = producer(write.inputs[0])
    _name_product(roles, write.inputs[0], f"{prefix}query", "")
    norm = producer(query.inputs[0]) if query is not None and is_matmul(query) else None
    if norm is not None and ours(norm, "RmsNorm") and id(norm) not in roles:  # else it is the layer's own
        roles.setdefault(id(norm), f"{prefix}query_norm")
        _name_product(roles, norm.inputs[0], f"{prefix}query_latent", "")
    for spread in _readers(node.outputs[0]):
        roles[id(spread)] = f"{prefix}attention_values"
        for user in _readers(spread.outputs[0]):
            if is_matmul(user):
                roles[id(user)] = f"{prefix}attention_out"


def _name_linear(roles: dict[int, str], node: gs.Node, prefix: str) -> None:
    """prefix: ends as the names of the layer's nodes begin."""
    roles[id(node)] = f"{prefix}attention"
    conv = producer(node.inputs[0])
    if ours(conv, "CausalConv"):
        assert conv is not None, "ours says so"
        roles[id(conv)] = f"{prefix}conv"
        _name_product(roles, conv.inputs[0], f"{prefix}qkv", f"{prefix}norm")
    for tensor, name in zip(node.inputs[1:3], ("step", "strength"), strict=True):
        _name_product(roles, tensor, f"{prefix}{name}", "")
    for user in _readers(node.outputs[0]):
        if ours(user, "GatedNorm"):
            roles[id(user)] = f"{prefix}gated_norm"
            _name_product(roles, user.inputs[1], f"{prefix}gate", "")
            user = next(_readers(user.outputs[0]), user)
        if is_matmul(user):
            roles[id(user)] = f"{prefix}out"


def _name_conv(roles: dict[int, str], node: gs.Node, name: str) -> None:
    """A convolution between two products of activations."""
    roles[id(node)] = name
    before = producer(node.inputs[0])
    if ours(before, "Activation"):
        assert before is not None, "ours says so"
        roles[id(before)] = f"{name}_gated_in"
        _name_product(roles, before.inputs[0], f"{name}_in", f"{name}_norm")
        _name_product(roles, before.inputs[1], f"{name}_gate_in", "")
    for user in _readers(node.outputs[0]):
        if not ours(user, "Activation"):
            continue
        roles[id(user)] = f"{name}_gated_out"
        for tensor in user.inputs:
            _name_product(roles, tensor, f"{name}_gate_out", "")
        for reader in _readers(user.outputs[0]):
            if is_matmul(reader):
                roles[id(reader)] = f"{name}_out"


def _name_product(roles: dict[int, str], tensor: gs.Tensor, name: str, norm: str) -> None:
    """The product that makes a tensor, or rows of it, and the norm before it."""
    node = producer(tensor)
    while copies_rows(node):
        assert node is not None, "it is one"
        node = producer(node.inputs[0])
    if is_matmul(node):
        assert node is not None, "it is one"
        roles[id(node)] = name
        if norm:
            _name_norm(roles, producer(_unscaled(node.inputs[0])), norm)


def _readers(tensor: gs.Tensor) -> Iterator[gs.Node]:
    """The nodes that read a tensor, or rows of it."""
    for node in tensor.outputs:
        yield from _readers(node.outputs[0]) if copies_rows(node) else (node,)


def _name_norm(roles: dict[int, str], node: gs.Node | None, name: str) -> None:
    if is_norm(node):
        roles.setdefault(id(node), name)


def _plain_name(node: gs.Node) -> str:
    if is_matmul(node):
        if any(map(routes, node.outputs[0].outputs)):
            return "moe_router"
        if any(ours(user, "AddGated") and decides(node.outputs[0], user) for user in node.outputs[0].outputs):
            return "shared_gate"
        return _inner(node) or "down"
    if is_norm(node):
        return "mlp_inner_norm" if _inner(producer(node.inputs[0])) else "mlp_norm"
    return plan_ops(node.op)[0]


def _inner(node: gs.Node | None) -> str:
    """The name of a product that makes what an MLP has between its matrices; else nothing."""
    if node is None or not is_matmul(node):
        return ""
    if node.attrs["gated"]:
        return "gate_up"
    return "up" if node.attrs["activation"] != "none" else ""
