"""Conv over the last tokens → CausalConv; a Scan of the gated delta rule, with what norms and repeats its keys →
LinearAttention; the norm and gate behind it → GatedNorm; attention times Sigmoid(gate) → SigmoidGate.
"""

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.attention_pattern import SPLIT_HEADS
from ingot.builder.graph import (
    DOMAIN,
    Attr,
    Graph,
    is_op,
    is_weight,
    optional_input,
    ours,
    producer,
    scalar,
    small_ints,
    weight_shape,
)
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.rewrite import Match, Op, W, X

_CHANNELS_FIRST = [0, 2, 1]
_MOST_NODES = 20  # of a body that is looked at


def _next_layer(graph: Graph) -> int:
    """States are numbered in the order of the graph; lowering puts them behind the layers with keys and values."""
    return len(graph.plugins("CausalConv")) + len(graph.plugins("LinearAttention"))


def _check_conv(graph: Graph, match: Match) -> str | None:
    conv, shape = match["conv"], weight_shape(match["weight"])
    if any(match[name].attrs.get("perm") != _CHANNELS_FIRST for name in ("first", "last")):
        return "the convolution does not run over [batch, channels, sequence]"
    if len(shape) != 3 or shape[1] != 1 or conv.attrs.get("group", 1) != shape[0]:
        return "the convolution mixes channels"
    usual = {"strides": [1], "dilations": [1], "auto_pad": "NOTSET", "pads": [shape[2] - 1, 0]}
    if any(conv.attrs.get(name, value if name != "pads" else None) != value for name, value in usual.items()):
        return "the convolution sees other tokens than the last ones"
    bias = optional_input(conv, 2)
    return None if shape[2] > 1 and (bias is None or is_weight(bias)) else "the convolution has no constant weights"


def _rewrite_conv(graph: Graph, match: Match) -> None:
    channels, _, width = weight_shape(match["weight"])

    def expression(op: str, tensor: gs.Tensor, shape: list[int]) -> gs.Variable:
        return graph.insert(op, [tensor, graph.constant(np.array(shape, np.int64))], {}, domain="")[0]

    rows = expression("Reshape", match["weight"], [channels, width])
    columns = graph.insert("Transpose", [rows], {"perm": [1, 0]}, domain="")[0]
    weight = expression("Reshape", columns, [width * channels])
    attrs: dict[str, Attr] = {"layer": _next_layer(graph), "channels": channels, "width": width, "activation": "none"}
    graph.replace(match.output, "CausalConv", [match["x"], weight, optional_input(match["conv"], 2)], attrs)


def _check_silu(graph: Graph, match: Match) -> str | None:
    conv = producer(match["y"])
    if not ours(conv, "CausalConv"):
        return "no convolution"
    alone = conv is not None and conv.attrs["activation"] == "none" and graph.users(match["y"]) == 2
    return None if alone else "the convolution is used without the activation"


def _rewrite_silu(graph: Graph, match: Match) -> None:
    conv = producer(match["y"])
    assert conv is not None, "check has seen it"
    graph.replace(match.output, "CausalConv", conv.inputs, {**conv.attrs, "activation": "silu"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keys:
    """Queries or keys [batch, sequence, heads, dim], or values: what they were made of, and how."""

    source: gs.Tensor
    heads: int
    dim: int
    times: int = 1
    scale: float = 1.0
    eps: float = 0.0


def _reshaped(tensor: gs.Tensor) -> tuple[gs.Tensor, int, int] | None:
    """(x, heads, dim) of x reshaped to [0, 0, heads, dim]."""
    node = producer(tensor)
    shape = small_ints(node.inputs[1]) if is_op(node, "Reshape") else None
    if node is None or shape is None or len(shape) != 4 or shape[:2] != [0, 0] or min(shape[2:]) < 1:
        return None
    return node.inputs[0], shape[2], shape[3]


def _read_keys(tensor: gs.Tensor) -> _Keys | None:
    """None: not made as the rule's queries, keys or values are."""
    times, scale, eps = 1, 1.0, 0.0
    found = _reshaped(tensor)
    expand = None if found is None else producer(found[0])
    if found is not None and is_op(expand, "Expand"):
        column, shape = producer(expand.inputs[0]), small_ints(expand.inputs[1])
        if not is_op(column, "Unsqueeze") or small_ints(column.inputs[1]) != [3] or shape is None or len(shape) != 5:
            return None
        times = shape[3]
        if shape != [1, 1, 1, times, 1]:
            return None
        tensor = column.inputs[0]
    node = producer(tensor)
    if is_op(node, "Mul") and (number := scalar(node.inputs[1])) is not None:
        scale, node = number, producer(node.inputs[0])
    if is_op(node, "Div"):
        tensor, root = node.inputs
        norm = _sum_of_squares(root, tensor)
        if norm is None:
            return None
        eps = norm
    elif scale != 1.0:
        return None
    made = _reshaped(tensor)
    if made is None:
        return None
    return _Keys(source=made[0], heads=made[1], dim=made[2], times=times, scale=scale, eps=eps)


def _sum_of_squares(root: gs.Tensor, x: gs.Tensor) -> float | None:
    """eps of sqrt(sum of x * x over the last dimension + eps)"""
    node = producer(root)
    add = producer(node.inputs[0]) if is_op(node, "Sqrt") else None
    eps = scalar(add.inputs[1]) if is_op(add, "Add") else None
    total = producer(add.inputs[0]) if add is not None and eps is not None else None
    if not is_op(total, "ReduceSum") or small_ints(total.inputs[1]) not in ([-1], [3]):
        return None
    square = producer(total.inputs[0])
    same = is_op(square, "Mul") and all(each is x for each in square.inputs)
    return eps if same and total.attrs.get("keepdims", 1) == 1 else None


def _signature(body: gs.Graph) -> tuple[str, ...]:
    """The outputs of a Scan's body in terms of its inputs, whatever its names; none of a long body, in which the same
    term may stand many times."""
    if len(body.nodes) > _MOST_NODES:
        return ()
    names = {id(tensor): name for tensor, name in zip(body.inputs, "sqkvgb", strict=False)}

    def term(tensor: gs.Tensor) -> str:
        if id(tensor) in names:
            return names[id(tensor)]
        node = producer(tensor)
        if node is None:
            return str(small_ints(tensor))
        return _term(node.op, *(term(each) for each in node.inputs))

    return tuple(term(tensor) for tensor in body.outputs)


def _term(op: str, *args: str) -> str:
    return f"{op}({','.join(sorted(args) if op in ('Add', 'Mul') else args)})"


def _delta_rule() -> tuple[str, str]:
    def row(name: str) -> str:
        return _term("Unsqueeze", name, "[2]")

    kept = _term("Mul", "s", _term("Exp", _term("Unsqueeze", "g", "[2, 3]")))
    new = _term("Sub", row("v"), _term("MatMul", row("k"), kept))
    change = _term("Mul", new, _term("Unsqueeze", "b", "[2, 3]"))
    state = _term("Add", kept, _term("MatMul", _term("Unsqueeze", "k", "[3]"), change))
    return state, _term("Squeeze", _term("MatMul", row("q"), state), "[2]")


_DELTA_RULE = _delta_rule()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
    x: gs.Tensor
    dt: gs.Tensor
    beta: gs.Tensor
    a_log: gs.Tensor
    attrs: dict[str, Attr]


def _read_scan(graph: Graph, scan: gs.Node) -> _Rule | str:
    """The parts of a scan of the delta rule, or why it is none."""
    if len(scan.inputs) != 6 or len(scan.outputs) != 2 or scan.attrs.get("num_scan_inputs") != 5:
        return "the scan has other inputs than a state, q, k, v, decay and strength"
    if _signature(scan.attrs["body"]) != _DELTA_RULE:
        return "the scan does not compute the gated delta rule"
    turned = any(scan.attrs.get(f"scan_{kind}_directions", [0]) != [0] * n for kind, n in (("output", 1),))
    turned = turned or any(scan.attrs.get("scan_input_directions", [0]))
    if turned or scan.attrs.get("scan_input_axes") != [1] * 5 or scan.attrs.get("scan_output_axes") != [1]:
        return "the scan does not run over the sequence"
    if graph.users(scan.outputs[0]):
        return "the last state is used"
    q, k, v = (_read_keys(tensor) for tensor in scan.inputs[1:4])
    if q is None or k is None or v is None or v.eps or v.times != 1 or k.scale != 1 or q.eps != k.eps:
        return "q, k and v are not made as those of the delta rule"
    if (q.heads, q.dim, q.times) != (k.heads, k.dim, k.times) or q.heads * q.times != v.heads:
        return "the heads of q, k and v do not fit together"
    if not _fresh(scan.inputs[0], [v.heads, k.dim, v.dim]):
        return "the state does not begin with zeros"
    split = producer(q.source)
    sizes = [q.heads * q.dim, k.heads * k.dim, v.heads * v.dim]
    if not is_op(split, "Split") or len(split.outputs) != 3 or small_ints(optional_input(split, 1)) != sizes:
        return "q, k and v are not parts of one tensor"
    if any(each is not side.source for each, side in zip(split.outputs, (q, k, v), strict=True)):
        return "q, k and v do not lie in this order"
    decay, strength = producer(scan.inputs[4]), producer(scan.inputs[5])
    if not is_op(strength, "Sigmoid") or not is_op(decay, "Mul"):
        return "decay or strength is made otherwise"
    sides = sorted((producer(each) for each in decay.inputs), key=lambda node: is_op(node, "Neg"))
    exponential = producer(sides[1].inputs[0]) if is_op(sides[1], "Neg") else None
    if not is_op(sides[0], "Softplus") or not is_op(exponential, "Exp") or not is_weight(exponential.inputs[0]):
        return "the decay is no -exp(weight) * softplus(.)"
    attrs: dict[str, Attr] = {
        "heads": v.heads,
        "key_heads": k.heads,
        "key_dim": k.dim,
        "value_dim": v.dim,
        "scale": q.scale,
        "l2_eps": k.eps,
    }
    assert sides[0] is not None, "a Softplus"
    dt, a_log = sides[0].inputs[0], exponential.inputs[0]
    return _Rule(x=split.inputs[0], dt=dt, beta=strength.inputs[0], a_log=a_log, attrs=attrs)


def _fresh(tensor: gs.Tensor, shape: list[int]) -> bool:
    """Whether a tensor is zeros of [batch, *shape]."""
    node = producer(tensor)
    sizes = producer(node.inputs[0]) if is_op(node, "ConstantOfShape") and "value" not in node.attrs else None
    return is_op(sizes, "Concat") and len(sizes.inputs) == 2 and small_ints(sizes.inputs[1]) == shape


def _check_scan(graph: Graph, match: Match) -> str | None:
    found = _read_scan(graph, match.root)
    return found if isinstance(found, str) else None


def _rewrite_scan(graph: Graph, match: Match) -> None:
    rule = _read_scan(graph, match.root)
    assert not isinstance(rule, str), "check has read it"
    attrs: dict[str, Attr] = {"layer": _next_layer(graph), **rule.attrs}
    graph.replace(match.root.outputs[1], "LinearAttention", [rule.x, rule.dt, rule.beta, rule.a_log], attrs)


def _check_norm(graph: Graph, match: Match) -> str | None:
    attention, gate = producer(match["o"]), _reshaped(match["z"])
    if attention is None or not ours(attention, "LinearAttention") or gate is None:
        return "no norm behind linear attention"
    heads, dim = attention.attrs["heads"], attention.attrs["value_dim"]
    if gate[1:] != (heads, dim) or weight_shape(match["weight"]) != (dim,):
        return "norm or gate do not run over the heads"
    shape = small_ints(match.root.inputs[1])
    return None if shape in ([0, 0, heads * dim], [0, 0, -1]) else "the heads are not merged"


def _rewrite_norm(graph: Graph, match: Match) -> None:
    gate = _reshaped(match["z"])
    assert gate is not None, "check has read it"
    attrs: dict[str, Attr] = {
        "eps": float(match["norm"].attrs["eps"]),
        "columns": gate[2],
        "norm_first": 1,
        "activation": "silu",
    }
    graph.replace(match.output, "GatedNorm", [match["o"], gate[0], match["weight"]], attrs)


def _check_gate(graph: Graph, match: Match) -> str | None:
    merge = producer(match["x"])
    heads = producer(merge.inputs[0]) if is_op(merge, "Reshape") else None
    if not is_op(heads, "Transpose") or heads.attrs.get("perm") != SPLIT_HEADS:
        return "no attention"
    return None if is_op(producer(heads.inputs[0]), "Attention") else "no attention"


def _rewrite_gate(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "SigmoidGate", [match["x"], match["gate"]], {})


_CONV = Op("Conv", Op("Transpose", X("x"), name="first"), W("weight"), name="conv")
_NORM = Op("RmsNorm", X("o"), W("weight"), name="norm", domain=DOMAIN)

PASS = Fusion(
    name="insert_linear_attention",
    rules=[
        Rule(pattern=Op("Transpose", _CONV, name="last"), check=_check_conv, rewrite=_rewrite_conv),
        Rule(pattern=Op("Mul", X("y"), Op("Sigmoid", X("y"))), check=_check_silu, rewrite=_rewrite_silu),
        Rule(pattern=Op("Scan"), check=_check_scan, rewrite=_rewrite_scan),
        Rule(
            pattern=Op("Reshape", Op("Mul", _NORM, Op("Mul", X("z"), Op("Sigmoid", X("z"))))),
            check=_check_norm,
            rewrite=_rewrite_norm,
        ),
        Rule(pattern=Op("Mul", X("x"), Op("Sigmoid", X("gate"))), check=_check_gate, rewrite=_rewrite_gate),
    ],
)
