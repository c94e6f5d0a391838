"""Conv over the last tokens → CausalConv; a Scan of the gated delta rule or of Mamba 2, with what norms and repeats its
keys → LinearAttention; norm and gate behind it → GatedNorm; attention times Sigmoid(gate) → SigmoidGate.
"""

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
    small_ints,
    small_value,
    weight_shape,
)
from ingot.builder.node_kinds import count_of, keeps_state
from ingot.builder.passes.base import Fusion, Rule
from ingot.builder.recurrence_pattern import read_heads, read_recurrence
from ingot.builder.rewrite import Match, Op, W, X

_CHANNELS_FIRST = [0, 2, 1]


def _next_layer(graph: Graph) -> int:
    """States are numbered in the order of the graph; lowering puts them behind the layers with keys and values."""
    return count_of(graph, keeps_state)


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
    conv = match["conv"]
    alone = conv is match["again"] and conv.attrs["activation"] == "none" and graph.users(conv.outputs[0]) == 2
    return None if alone else "the convolution is used without the activation"


def _rewrite_silu(graph: Graph, match: Match) -> None:
    conv = match["conv"]
    graph.replace(match.output, "CausalConv", conv.inputs, {**conv.attrs, "activation": "silu"})


def _check_scan(graph: Graph, match: Match) -> str | None:
    found = read_recurrence(graph, match.root)
    return found if isinstance(found, str) else None


def _rewrite_scan(graph: Graph, match: Match) -> None:
    found = read_recurrence(graph, match.root)
    assert not isinstance(found, str), "check has read it"
    attrs: dict[str, Attr] = {"layer": _next_layer(graph), **found.attrs}
    a_log = found.a_log
    if len(weight_shape(a_log)) > 1:
        shape = graph.constant(np.array([attrs["heads"]], np.int64))
        a_log = graph.insert("Reshape", [a_log, shape], {}, domain="")[0]
    graph.replace(match.root.outputs[1], "LinearAttention", [found.x, found.dt, found.beta, a_log], attrs)


def _check_skip(graph: Graph, match: Match) -> str | None:
    attention, value = producer(match["o"]), read_heads(match["v"])
    if attention is None or not ours(attention, "LinearAttention") or len(attention.inputs) > 4 or value is None:
        return "no linear attention"
    split = producer(value[0])
    if not is_op(split, "Split") or split.inputs[0] is not attention.inputs[0] or graph.users(match["o"]) > 1:
        return "what is added is not made of the values, or the state's part alone is used as well"
    first = split.outputs[0 if attention.attrs["values_first"] else 2] is value[0]
    return None if first and weight_shape(match["skip"]) == (value[1], 1) else "another factor for each head is needed"


def _rewrite_skip(graph: Graph, match: Match) -> None:
    attention = producer(match["o"])
    assert attention is not None, "check has seen it"
    heads = graph.constant(np.array([attention.attrs["heads"]], np.int64))
    skip = graph.insert("Reshape", [match["skip"], heads], {}, domain="")[0]
    inputs = [optional_input(attention, index) for index in range(4)]
    graph.replace(match.output, "LinearAttention", [*inputs, skip], dict(attention.attrs))


def _check_norm(graph: Graph, match: Match) -> str | None:
    attention, gate = producer(match["o"]), read_heads(match["z"])
    if attention is None or not ours(attention, "LinearAttention") or gate is None:
        return "no norm behind linear attention"
    heads, dim = attention.attrs["heads"], attention.attrs["value_dim"]
    if gate[1:] != (heads, dim) or weight_shape(match["weight"]) != (dim,):
        return "norm or gate do not run over the heads"
    shape = small_ints(match.root.inputs[1])
    return None if shape in ([0, 0, heads * dim], [0, 0, -1]) else "the heads are not merged"


def _rewrite_norm(graph: Graph, match: Match) -> None:
    gate = read_heads(match["z"])
    assert gate is not None, "check has read it"
    attrs: dict[str, Attr] = {
        "eps": float(match["norm"].attrs["eps"]),
        "columns": gate[2],
        "norm_first": 1,
        "activation": "sigmoid" if "open" in match.bindings else "silu",
    }
    graph.replace(match.output, "GatedNorm", [match["o"], gate[0], match["weight"]], attrs)


def _check_gated(graph: Graph, match: Match, *, normed: bool = True) -> str | None:
    attention = producer(match["o"])
    if attention is None or not ours(attention, "LinearAttention"):
        return "no linear attention"
    width = attention.attrs["heads"] * attention.attrs["value_dim"]
    if small_ints(match["merge"].inputs[1]) not in ([0, 0, width], [0, 0, -1]):
        return "the heads are not merged"
    if not normed:
        return None
    if "split" in match.bindings:
        return _check_groups(match, width)
    return None if weight_shape(match["weight"]) == (width,) else "the norm does not run over all columns"


def _check_groups(match: Match, width: int) -> str | None:
    """A norm of each group of columns, whose weights come after it."""
    shape, ones = small_ints(match["split"].inputs[1]), small_value(match["ones"])
    if shape is None or len(shape) != 4 or shape[:2] != [0, 0] or shape[2] * shape[3] != width:
        return "the norm does not run over groups of columns"
    if ones is None or ones.shape != (shape[3],) or (ones != 1).any():
        return "the norm of a group has weights of its own"
    joined = small_ints(match["join"].inputs[1]) in ([0, 0, width], [0, 0, -1])
    return None if joined and weight_shape(match["weight"]) == (width,) else "the groups are not merged"


def _rewrite_gated(graph: Graph, match: Match) -> None:
    width = weight_shape(match["weight"])[0]
    shape = small_ints(match["split"].inputs[1]) if "split" in match.bindings else None
    attrs: dict[str, Attr] = {
        "eps": float(match["norm"].attrs["eps"]),
        "columns": width if shape is None else shape[3],
        "norm_first": 0,
        "activation": "silu",
    }
    graph.replace(match.output, "GatedNorm", [match["o"], match["z"], match["weight"]], attrs)


def _check_ungrouped(graph: Graph, match: Match) -> str | None:
    """The gate alone, behind which there is no norm that has a rule of its own."""
    users = match.output.outputs
    if any(is_op(user, "Reshape") or ours(user, "RmsNorm") for user in users):
        return "a norm behind the gate is part of it"
    return _check_gated(graph, match, normed=False)


def _rewrite_ungrouped(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "Activation", [match["z"], match["o"]], {"activation": "silu"})


def _check_gate(graph: Graph, match: Match) -> str | None:
    return None if match["heads"].attrs.get("perm") == SPLIT_HEADS else "the gate is not in the order of the heads"


def _rewrite_gate(graph: Graph, match: Match) -> None:
    graph.replace(match.output, "SigmoidGate", [match["merge"].outputs[0], match["gate"]], {})


_CONV = Op("Conv", Op("Transpose", X("x"), name="first"), W("weight"), name="conv")
_NORM = Op("RmsNorm", X("o"), W("weight"), name="norm", domain=DOMAIN)

_GATED = Op("Mul", Op("Reshape", X("o"), name="merge"), Op("Mul", X("z"), Op("Sigmoid", X("z"))))
_GROUPS = Op("RmsNorm", Op("Reshape", _GATED, name="split"), W("ones"), name="norm", domain=DOMAIN)

_ATTENTION = Op("Reshape", Op("Transpose", Op("Attention"), name="heads"), name="merge")


def _convolved(name: str) -> Op:
    return Op("CausalConv", name=name, domain=DOMAIN)


PASS = Fusion(
    name="insert_linear_attention",
    rules=[
        Rule(pattern=Op("Transpose", _CONV, name="last"), check=_check_conv, rewrite=_rewrite_conv),
        Rule(
            pattern=Op("Mul", _convolved("conv"), Op("Sigmoid", _convolved("again"))),
            check=_check_silu,
            rewrite=_rewrite_silu,
        ),
        Rule(pattern=Op("Scan"), check=_check_scan, rewrite=_rewrite_scan),
        Rule(pattern=Op("Add", X("o"), Op("Mul", X("v"), W("skip"))), check=_check_skip, rewrite=_rewrite_skip),
        Rule(
            pattern=Op("Reshape", Op("Mul", _NORM, Op("Mul", X("z"), Op("Sigmoid", X("z"))))),
            check=_check_norm,
            rewrite=_rewrite_norm,
        ),
        Rule(
            pattern=Op("Reshape", Op("Mul", _NORM, Op("Sigmoid", X("z"), name="open"))),
            check=_check_norm,
            rewrite=_rewrite_norm,
        ),
        Rule(
            pattern=Op("RmsNorm", _GATED, W("weight"), name="norm", domain=DOMAIN),
            check=_check_gated,
            rewrite=_rewrite_gated,
        ),
        Rule(
            pattern=Op("Mul", Op("Reshape", _GROUPS, name="join"), W("weight")),
            check=_check_gated,
            rewrite=_rewrite_gated,
        ),
        Rule(pattern=_GATED, check=_check_ungrouped, rewrite=_rewrite_ungrouped),
        Rule(pattern=Op("Mul", _ATTENTION, Op("Sigmoid", X("gate"))), check=_check_gate, rewrite=_rewrite_gate),
    ],
)
