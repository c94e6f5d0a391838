"""What a target's kernels cannot take is refused when it is built: an engine that no session opens is of no use."""

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from ingot.builder.graph import Graph, optional_input, ours, weight_shape
from ingot.builder.node_kinds import (
    applies_any_function,
    attends,
    attends_to_latents,
    is_of_heads,
    is_product,
    keeps_state,
    reads_table,
    writes_kv,
)
from ingot.builder.precision import product_weight
from ingot.builder.select import ATTENTIONS, plan_ops
from ingot.errors import BuildError, NoKernelError
from ingot.plan import Plan, Rows
from ingot.plugins.registry import find_op
from ingot.plugins.target import KernelLimits, Target

_OTHERS = "a cuda or CPU target, or for ref"
Excess = tuple[str, str, str, str]
"""(what is too large, where, what the kernels take, what the model has)"""


def check_graph(graph: Graph, target: Target) -> None:
    """Heads, experts and weights of a graph of plugins. Raises BuildError before any work is done for the target."""
    for node in graph.nodes:
        if keeps_state(node) or attends_to_latents(node) or is_of_heads(node):
            _check_ranges(node)
    limits = target.limits()
    sinks = [node.name for node in graph.plugins("PagedAttention") if optional_input(node, 4) is not None]
    slopes = [node.name for node in graph.plugins("PagedAttention") if optional_input(node, 5) is not None]
    made = [node.name for node in graph.nodes if _makes_values(node)]
    several = _other_heads(graph) if limits.one_group else []
    others = [node for node in graph.nodes if limits.activations and _activation(node) not in limits.activations]
    if others:
        what = f"for the activation {_activation(others[0])}"
        raise NoKernelError(
            f"{target.name} has no kernel {what}", where=others[0].name, hint="build for a CPU target, or for ref"
        )
    for where, taken, what in (
        (sinks, limits.sinks, "that takes attention sinks"),
        (slopes, limits.slopes, "for scores that fall with the distance (ALiBi)"),
        (several, not several, "for layers whose heads have other sizes or groups"),
        (made, limits.made_values, "for values that are normed, made of keys, or another layer's"),
    ):
        if where and not taken:
            raise NoKernelError(f"{target.name} has no kernel {what}", where=where[0], hint=f"build for {_OTHERS}")
    for excess in _of_graph(graph, limits):
        _refuse(target, excess)


def _other_heads(graph: Graph) -> list[str]:
    """Attentions whose query heads per key head, key heads, or their elements are other ones than the first's."""
    kinds = {
        node.name: tuple(int(node.attrs[key]) for key in ("heads", "kv_heads", "head_dim"))
        for node in graph.nodes
        if ours(node, *ATTENTIONS)
    }
    first = next(iter(kinds.values()), None)
    return [name for name, kind in kinds.items() if kind != first]


def _activation(node: gs.Node) -> str:
    """The function that a node applies to a product or by itself."""
    return str(node.attrs["activation"]) if applies_any_function(node) else "none"


def check_plan(plan: Plan, target: Target) -> None:
    """What depends on the limits of the engine too. Raises BuildError."""
    for step in plan.steps if not target.limits().growth else ():
        if not step.attrs.get("growth"):
            continue
        if plan.limits.max_seq_len > (most := int(step.attrs["growth_every"])):
            raise NoKernelError(
                f"{target.name} has no kernel for queries that are scaled by their position",
                where=step.name,
                expected=f"at most {most:,} tokens, up to which they are not scaled",
                got=f"--max_seq_len {plan.limits.max_seq_len:,}",
                hint=f"give --max_seq_len {most}, or build for {_OTHERS}",
            )
    for excess in _of_plan(plan, target.limits()):
        _refuse(target, excess)


def _makes_values(node: gs.Node) -> bool:
    """Whether an attention's values are anything but parts of its layer's product."""
    if writes_kv(node):
        return bool(node.attrs.get("value_norm") or node.attrs.get("keys_as_values"))
    return attends(node) and not attends_to_latents(node)


def _check_ranges(node: gs.Node) -> None:
    """The op itself limits the sizes of a state or a latent, for every target."""
    op = find_op(plan_ops(node.op)[0])
    for key, rule in op.attr_rules.items():
        if key in node.attrs and not rule(node.attrs[key]):
            raise BuildError(
                f"the {key} of a layer that keeps a state or a latent is out of range",
                where=node.name,
                got=str(node.attrs[key]),
                hint="no target has kernels for this size: convert another model",
            )


def _refuse(target: Target, excess: Excess) -> None:
    what, where, expected, got = excess
    raise BuildError(
        f"{what} beyond what the kernels of {target.name} take",
        where=where,
        expected=expected,
        got=got,
        hint="build for another target, or with smaller limits",
    )


def _of_graph(graph: Graph, limits: KernelLimits) -> Iterator[Excess]:
    attentions = [node for node in graph.nodes if ours(node, *ATTENTIONS)]
    if len(attentions) > limits.layers:
        yield "the layers are", "the graph", f"at most {limits.layers:,}", f"{len(attentions):,}"
    for node in attentions:
        yield from _of_attention(node, limits)
    yield from _of_latents(graph, limits)
    for node in graph.nodes:
        if is_product(node) or reads_table(node):
            yield from _of_weight(node, limits)


def _of_latents(graph: Graph, limits: KernelLimits) -> Iterator[Excess]:
    """And of states."""
    for node in filter(attends_to_latents, graph.nodes):
        for key, largest in (("head_dim", limits.latent_dim), ("rank", limits.rank)):
            size = int(node.attrs[key])
            if size > largest:
                yield f"the {key} of latent attention is", node.name, f"at most {largest:,}", f"{size:,}"
            if size % limits.head_dim_multiple:
                multiple = f"a multiple of {limits.head_dim_multiple}"
                yield f"the {key} of latent attention is", node.name, multiple, f"{size:,}"
    for node in filter(keeps_state, graph.nodes):
        if (dim := int(node.attrs.get("key_dim", 0))) > limits.key_dim:
            yield (
                "the dimensions of a key of linear attention are",
                node.name,
                f"at most {limits.key_dim:,}",
                f"{dim:,}",
            )


def _of_attention(node: gs.Node, limits: KernelLimits) -> Iterator[Excess]:
    heads, kv_heads, dim, window = (int(node.attrs[key]) for key in ("heads", "kv_heads", "head_dim", "window"))
    if dim > limits.head_dim or dim % limits.head_dim_multiple:
        expected = f"a multiple of {limits.head_dim_multiple}, at most {limits.head_dim:,}"
        yield "the dimensions of an attention head are", node.name, expected, f"{dim:,}"
    for what, count, most in (
        ("the query heads are", heads, limits.heads),
        ("the key heads are", kv_heads, limits.heads),
        ("the query heads of one key head are", heads // kv_heads, limits.group),
        ("the tokens of the sliding window are", window, limits.extent),
    ):
        if count > most:
            yield what, node.name, f"at most {most:,}", f"{count:,}"


def _of_weight(node: gs.Node, limits: KernelLimits) -> Iterator[Excess]:
    shape = weight_shape(product_weight(node))
    if max(shape) > limits.extent:
        yield "the rows or columns of the weight are", node.name, f"at most {limits.extent:,}", str(list(shape))
    if len(shape) == 3 and shape[0] > limits.experts:
        yield "the experts are", node.name, f"at most {limits.experts:,}", f"{shape[0]:,}"


def _of_plan(plan: Plan, limits: KernelLimits) -> Iterator[Excess]:
    rows = {Rows.TOKENS: plan.limits.max_num_tokens, Rows.LOGITS: plan.limits.max_logit_rows}
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    for buffer in plan.buffers:
        if buffer.cols > limits.extent:
            yield "the columns of a buffer are", buffer.name, f"at most {limits.extent:,}", f"{buffer.cols:,}"
    for step in plan.steps:
        if find_op(step.op).routes:
            ids = buffers[step.outputs[0]]
            taken = rows[ids.rows] * ids.cols
            if taken > limits.taken_experts:
                yield (
                    "the experts that the tokens of a step take are",
                    step.name,
                    f"at most {limits.taken_experts:,}",
                    f"{taken:,}: max_num_tokens is {plan.limits.max_num_tokens:,}",
                )
