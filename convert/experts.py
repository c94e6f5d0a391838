"""A mixture of experts → its weights, and its nodes of the Graph, where all experts compute all tokens.

    ┌ router ─ shares ─ keys ─ TopK ─ weights of the taken ones, 0 for the others ┐
x ──┼ gate_up ─ activation(gate) * up ─ down ─────────────────────────────────── Mul ─ sum ┐
    └ shared expert, times its gate ────────────────────────────────────────────────────── Add
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from ingot.configs.model import ModelConfig, MoeConfig, RouterScore

SELECT_BIAS = "router/select/bias"

Shape = tuple[int, ...]
Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    nodes: list[onnx.NodeProto]

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def linear(self, x: str, path: str, *, scale: float = 1.0) -> str: ...

    def activated(self, x: str, path: str) -> str: ...

    def norm(self, x: str, path: str) -> str: ...

    def float32(self, name: str) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def expert_shapes(moe: MoeConfig, hidden: int, path: str, *, mlp_bias: bool) -> dict[str, Shape]:
    """The weights of one layer's experts, stacked; gate_up holds the rows [gate | up] of each, or the ups alone."""
    shared, width, inner = moe.shared_size, moe.latent_size or hidden, moe.intermediate_size
    rows = 2 * inner if moe.gated else inner
    sizes = {name: (shared, hidden) for name in (("gate", "up") if moe.gated else ("up",)) if shared}
    sizes |= {"down": (hidden, shared)} if shared else {}
    around = {"latent/in": (width, hidden), "latent/out": (hidden, width)} if moe.latent_size else {}
    return {
        f"{path}/router/weight": (moe.experts, hidden),
        **({f"{path}/{SELECT_BIAS}": (moe.experts,)} if moe.select_bias else {}),
        **({f"{path}/router_norm/weight": (hidden,)} if moe.beside_mlp else {}),
        **({f"{path}/down/scale": (moe.experts,)} if moe.expert_scale else {}),
        f"{path}/gate_up/weight": (moe.experts, rows, width),
        f"{path}/down/weight": (moe.experts, width, inner),
        **({f"{path}/router/bias": (moe.experts,)} if moe.biases else {}),
        **({f"{path}/gate_up/bias": (moe.experts, rows)} if moe.biases else {}),
        **({f"{path}/down/bias": (moe.experts, width)} if moe.biases else {}),
        **{f"{path}/shared/{name}/weight": size for name, size in sizes.items()},
        **{f"{path}/shared/{name}/bias": size[:1] for name, size in sizes.items() if mlp_bias},
        **{f"{path}/{name}/weight": size for name, size in around.items()},
        **{f"{path}/{name}/bias": size[:1] for name, size in around.items() if mlp_bias},
        **({f"{path}/shared/scale/weight": (1, hidden)} if moe.shared_gate else {}),
    }


def beside_shapes(moe: MoeConfig, hidden: int, path: str) -> dict[str, Shape]:
    """Norms of a layer that has experts beside its MLP."""
    names = ("mlp_branch_norm", "moe_norm", "moe_branch_norm") if moe.beside_mlp else ()
    return {f"{path}/{name}/weight": (hidden,) for name in names}


def experts(g: Nodes, x: str, moe: MoeConfig, path: str) -> str:
    """[batch, sequence, hidden]"""
    if moe.latent_size:
        routed = g.linear(_routed(g, g.linear(x, f"{path}/latent/in"), x, moe, path), f"{path}/latent/out")
    else:
        routed = _routed(g, x, x, moe, path)
    if not moe.shared_size:
        return routed
    shared = f"{path}/shared"
    if moe.gated:
        gate, up = g.linear(x, f"{shared}/gate"), g.linear(x, f"{shared}/up")
        made = g.node("Mul", [g.activated(gate, shared), up], f"{shared}/gated")
    else:
        made = g.activated(g.linear(x, f"{shared}/up"), shared)
    made = g.linear(made, f"{shared}/down", scale=moe.shared_scale)
    if moe.shared_gate:
        scale = g.node("Sigmoid", [g.linear(x, f"{shared}/scale")], f"{shared}/scale/sigmoid")
        made = g.node("Mul", [made, scale], f"{shared}/scaled")
    return g.node("Add", [routed, made], f"{path}/with_shared")


def beside_mlp(g: Nodes, mlp: str, x: str, moe: MoeConfig, config: ModelConfig, path: str) -> str:
    """Experts whose input is x itself, the residual stream, normed, as is their router's; plus `mlp`, each normed."""
    root = g.constant("const/router_scale", np.float32(config.hidden_size**-0.5))
    factor = g.node("Mul", [g.float32(f"{path}/moe/router_norm/weight"), root], f"{path}/moe/router_norm/factor")
    routed = g.node(
        "RMSNormalization", [x, factor], f"{path}/moe/router_norm/rms_norm", axis=-1, epsilon=config.norm_eps
    )
    made = _routed(g, g.norm(x, f"{path}/moe_norm"), routed, moe, f"{path}/moe")
    both = [g.norm(mlp, f"{path}/mlp_branch_norm"), g.norm(made, f"{path}/moe_branch_norm")]
    return g.node("Add", both, f"{path}/moe/with_mlp")


def _routed(g: Nodes, x: str, router: str, moe: MoeConfig, path: str) -> str:
    """[batch, sequence, hidden]: experts compute [batch, experts, sequence, .]; most weigh 0. router: what it reads."""
    weights = _weights(g, router, moe, path)
    alike = g.node("Unsqueeze", [x, g.integers("axis_1", [1])], f"{path}/unsqueeze")
    made = _inner(g, _stacked(g, alike, moe, f"{path}/gate_up"), moe, path)
    made = _stacked(g, made, moe, f"{path}/down", scaled=moe.expert_scale)
    by_expert = g.node("Transpose", [weights], f"{path}/weights/transpose", perm=[0, 2, 1])
    column = g.node("Unsqueeze", [by_expert, g.integers("axis_last", [-1])], f"{path}/weights/unsqueeze")
    weighted = g.node("Mul", [made, column], f"{path}/weighted")
    return g.node("ReduceSum", [weighted, g.integers("axis_1", [1])], f"{path}/sum", keepdims=0)


def _inner(g: Nodes, both: str, moe: MoeConfig, path: str) -> str:
    """What the experts make of their first product, [batch, experts, sequence, intermediate_size]"""
    if not moe.gated:
        return g.activated(both, path)
    gate, up = f"{path}/gate/split", f"{path}/up/split"
    inputs = [both, g.integers("expert", [moe.intermediate_size] * 2)]
    g.nodes.append(helper.make_node("Split", inputs, [gate, up], f"{path}/split", axis=-1))
    return _gated(g, gate, up, moe, path)


def _gated(g: Nodes, gate: str, up: str, moe: MoeConfig, path: str) -> str:
    """What an expert makes of its gate and up."""
    if not moe.gate_limit:
        return g.node("Mul", [g.activated(gate, path), up], f"{path}/gated")
    names = {"limit": moe.gate_limit, "least": -moe.gate_limit, "alpha": moe.gate_alpha, "one": 1.0}
    limit, least, alpha, one = (g.constant(f"const/gate_{name}", np.float32(each)) for name, each in names.items())
    gate = g.node("Min", [gate, limit], f"{path}/gate/min")
    up = g.node("Max", [g.node("Min", [up, limit], f"{path}/up/min"), least], f"{path}/up/max")
    share = g.node("Sigmoid", [g.node("Mul", [gate, alpha], f"{path}/gate/scaled")], f"{path}/gate/sigmoid")
    glu = g.node("Mul", [gate, share], f"{path}/gate/glu")
    return g.node("Mul", [glu, g.node("Add", [up, one], f"{path}/up/add_one")], f"{path}/gated")


def _stacked(g: Nodes, x: str, moe: MoeConfig, path: str, *, scaled: bool = False) -> str:
    """x @ W (+ bias) of each expert, W stored [experts, out, in]; scaled: times a factor of the expert's"""
    stored = g.float32(f"{path}/weight")
    if scaled:
        cells = g.integers("cells", [-1, 1, 1])
        scale = g.node("Reshape", [g.float32(f"{path}/scale"), cells], f"{path}/scale_cells")
        stored = g.node("Mul", [stored, scale], f"{path}/scaled")
    weight = g.node("Transpose", [stored], f"{path}/transpose", perm=[0, 2, 1])
    y = g.node("MatMul", [x, weight], f"{path}/matmul")
    if not moe.biases:
        return y
    bias = g.node("Unsqueeze", [g.float32(f"{path}/bias"), g.integers("axis_1", [1])], f"{path}/bias/unsqueeze")
    return g.node("Add", [y, bias], f"{path}/add_bias")


def _weights(g: Nodes, x: str, moe: MoeConfig, path: str) -> str:
    """[batch, sequence, experts]: what each expert weighs for each token, 0 for those it does not take"""
    logits = g.linear(x, f"{path}/router")
    if moe.score is RouterScore.SOFTMAX:
        shares = g.node("Softmax", [logits], f"{path}/router/softmax", axis=-1)
    else:
        shares = g.node("Sigmoid", [logits], f"{path}/router/sigmoid")
    keys = shares
    if moe.select_bias:
        keys = g.node("Add", [shares, g.float32(f"{path}/{SELECT_BIAS}")], f"{path}/keys")
    if moe.groups > 1:
        keys = _of_best_groups(g, keys, moe, f"{path}/groups")
    top, chosen = _top(g, keys, moe.per_token, f"{path}/top")
    if keys != shares:
        top = g.node("GatherElements", [shares, chosen], f"{path}/top/shares", axis=2)
    if moe.normalized:
        top = g.node("Div", [top, _total(g, top, moe, f"{path}/top")], f"{path}/top/normalized")
    if moe.scale != 1:
        top = g.node("Mul", [top, g.constant("const/expert_scale", np.float32(moe.scale))], f"{path}/top/scaled")
    none = g.node("ConstantOfShape", [g.node("Shape", [shares], f"{path}/shape")], f"{path}/zeros")
    return g.node("ScatterElements", [none, chosen, top], f"{path}/weights", axis=-1)


def _total(g: Nodes, top: str, moe: MoeConfig, path: str) -> str:
    """What the shares of the taken experts are divided by, [batch, sequence, 1]"""
    total = g.node("ReduceSum", [top, g.integers("axis_last", [-1])], f"{path}/sum", keepdims=1)
    if moe.least_sum:
        least = g.constant("const/least_sum", np.float32(moe.least_sum))
        total = g.node("Max", [total, least], f"{path}/sum_at_least")
    if moe.sum_offset:
        offset = g.constant("const/sum_offset", np.float32(moe.sum_offset))
        total = g.node("Add", [total, offset], f"{path}/sum_with_offset")
    return total


def _of_best_groups(g: Nodes, keys: str, moe: MoeConfig, path: str) -> str:
    """The keys of the experts in the best groups, minus infinity for all others; [batch, sequence, experts]"""
    shape = g.integers("groups", [0, 0, moe.groups, moe.experts // moe.groups])
    grouped = g.node("Reshape", [keys, shape], f"{path}/reshape")
    best, _ = _top(g, grouped, moe.group_best, f"{path}/best")
    sums = g.node("ReduceSum", [best, g.integers("axis_last", [-1])], f"{path}/sums", keepdims=0)
    _, chosen = _top(g, sums, moe.group_top, f"{path}/top")
    none = g.node("ConstantOfShape", [g.node("Shape", [sums], f"{path}/shape")], f"{path}/zeros")
    one = helper.make_tensor("value", TensorProto.FLOAT, [1], [1.0])
    ones = f"{path}/ones"
    size = g.node("Shape", [chosen], f"{path}/top/shape")
    g.nodes.append(helper.make_node("ConstantOfShape", [size], [ones], ones, value=one))
    marked = g.node("ScatterElements", [none, chosen, ones], f"{path}/marked", axis=-1)
    taken = g.node("Cast", [marked], f"{path}/taken", to=TensorProto.BOOL)
    column = g.node("Unsqueeze", [taken, g.integers("axis_last", [-1])], f"{path}/unsqueeze")
    kept = g.node("Where", [column, grouped, g.constant("const/never", np.float32(-np.inf))], f"{path}/kept")
    return g.node("Reshape", [kept, g.integers("ungrouped", [0, 0, moe.experts])], f"{path}/keys")


def _top(g: Nodes, x: str, count: int, path: str) -> tuple[str, str]:
    """The `count` largest of the last axis, and their places"""
    values, places = f"{path}/values", f"{path}/places"
    inputs = [x, g.integers(f"count_{count}", [count])]
    g.nodes.append(helper.make_node("TopK", inputs, [values, places], path, axis=-1))
    return values, places
