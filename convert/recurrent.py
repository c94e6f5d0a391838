"""Layers with a recurrent state → nodes of the Graph: the gated delta rule as a Scan, short convolutions as a Conv.

    ┌ qkv ─ Conv ─ silu ─ Split ─ norms ┐
x ──┼ dt ── Softplus ─ Mul(-exp(a_log)) ─┼─ Scan ─ norm ─ Mul ─ out
    ├ b ─── Sigmoid ────────────────────┘                │
    └ z ─── silu ────────────────────────────────────────┘
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ingot.configs.model import LinearAttentionConfig, ModelConfig, ShortConvConfig

Shape = tuple[int, ...]
Attribute = int | float | str | list[int]

_L2_EPS = 1e-6  # of queries and keys, under the root of their sum of squares: the same in every model


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    nodes: list[onnx.NodeProto]

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def linear(self, x: str, path: str) -> str: ...

    def float32(self, name: str) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def recurrent_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """The weights of a layer that keeps a state in place of keys and values; none of one with attention."""
    path, hidden = f"layers.{layer}", config.hidden_size
    if isinstance(mixer := config.mixer_of(layer), LinearAttentionConfig):
        keys, values = mixer.key_heads * mixer.key_dim, mixer.heads * mixer.value_dim
        return {
            f"{path}/linear/qkv/weight": (2 * keys + values, hidden),
            f"{path}/linear/z/weight": (values, hidden),
            f"{path}/linear/b/weight": (mixer.heads, hidden),
            f"{path}/linear/dt/weight": (mixer.heads, hidden),
            f"{path}/linear/dt/bias": (mixer.heads,),
            f"{path}/linear/a_log/weight": (mixer.heads,),
            f"{path}/linear/conv/weight": (2 * keys + values, 1, mixer.conv_width),
            f"{path}/linear/norm/weight": (mixer.value_dim,),
            f"{path}/linear/out/weight": (hidden, values),
        }
    if isinstance(mixer, ShortConvConfig):
        biases = {f"{path}/conv/{name}/bias": (hidden,) for name in ("b", "c", "x", "conv", "out") if mixer.bias}
        return {
            **{f"{path}/conv/{name}/weight": (hidden, hidden) for name in ("b", "c", "x", "out")},
            f"{path}/conv/conv/weight": (hidden, 1, mixer.width),
            **biases,
        }
    return {}


def recurrent_mixer(nodes: Nodes, x: str, config: ModelConfig, layer: int) -> str | None:
    """What the layer's mixer adds to the residual stream, [batch, sequence, hidden]; None where it is attention."""
    if isinstance(mixer := config.mixer_of(layer), LinearAttentionConfig):
        return _linear_attention(nodes, x, mixer, config, f"layers.{layer}/linear")
    if isinstance(mixer, ShortConvConfig):
        return _short_conv(nodes, x, mixer, config, f"layers.{layer}/conv")
    return None


def _conv(nodes: Nodes, x: str, channels: int, width: int, path: str, *, bias: bool = False) -> str:
    """Each channel over the last `width` tokens, [batch, sequence, channels]"""
    turned = nodes.node("Transpose", [x], f"{path}/turn", perm=[0, 2, 1])
    inputs = [turned, nodes.float32(f"{path}/weight"), *([nodes.float32(f"{path}/bias")] if bias else [])]
    made = nodes.node("Conv", inputs, path, group=channels, kernel_shape=[width], pads=[width - 1, 0])
    return nodes.node("Transpose", [made], f"{path}/turn_back", perm=[0, 2, 1])


def _short_conv(nodes: Nodes, x: str, mixer: ShortConvConfig, config: ModelConfig, path: str) -> str:
    before, after, value = (nodes.linear(x, f"{path}/{name}") for name in ("b", "c", "x"))
    gated = nodes.node("Mul", [before, value], f"{path}/gated")
    mixed = _conv(nodes, gated, config.hidden_size, mixer.width, f"{path}/conv", bias=mixer.bias)
    return nodes.linear(nodes.node("Mul", [after, mixed], f"{path}/gated_again"), f"{path}/out")


def _linear_attention(nodes: Nodes, x: str, mixer: LinearAttentionConfig, config: ModelConfig, path: str) -> str:
    keys, values = mixer.key_heads * mixer.key_dim, mixer.heads * mixer.value_dim
    mixed = _conv(nodes, nodes.linear(x, f"{path}/qkv"), 2 * keys + values, mixer.conv_width, f"{path}/conv")
    mixed = _silu(nodes, mixed, f"{path}/conv")
    parts = [f"{path}/{name}/split" for name in ("q", "k", "v")]
    sizes = nodes.integers("linear_sizes", [keys, keys, values])
    nodes.nodes.append(helper.make_node("Split", [mixed, sizes], parts, f"{path}/split", axis=-1))
    query, key = (_keys(nodes, part, mixer, f"{path}/{name}") for part, name in zip(parts, ("q", "k"), strict=False))
    value = _heads(nodes, parts[2], mixer.heads, mixer.value_dim, f"{path}/v")
    rate = nodes.node("Neg", [nodes.node("Exp", [nodes.float32(f"{path}/a_log/weight")], f"{path}/exp")], f"{path}/neg")
    steps = nodes.node("Softplus", [nodes.linear(x, f"{path}/dt")], f"{path}/softplus")
    decay = nodes.node("Mul", [steps, rate], f"{path}/decay")
    strength = nodes.node("Sigmoid", [nodes.linear(x, f"{path}/b")], f"{path}/strength")
    first = nodes.integers("first", [0])
    batch = nodes.node("Gather", ["positions/shape", first], f"{path}/batch", axis=0)
    state = nodes.integers("state_shape", [mixer.heads, mixer.key_dim, mixer.value_dim])
    shape = nodes.node("Concat", [batch, state], f"{path}/state_shape", axis=0)
    inputs = [nodes.node("ConstantOfShape", [shape], f"{path}/state"), query, key, value, decay, strength]
    out = f"{path}/scan"
    nodes.nodes.append(
        helper.make_node(
            "Scan",
            inputs,
            [f"{path}/last_state", out],
            out,
            body=delta_rule(),
            num_scan_inputs=5,
            scan_input_axes=[1] * 5,
            scan_output_axes=[1],
        )
    )
    weight = nodes.float32(f"{path}/norm/weight")
    normed = nodes.node("RMSNormalization", [out, weight], f"{path}/norm", axis=-1, epsilon=config.norm_eps)
    gate = _silu(
        nodes, _heads(nodes, nodes.linear(x, f"{path}/z"), mixer.heads, mixer.value_dim, f"{path}/z"), f"{path}/z"
    )
    gated = nodes.node("Mul", [normed, gate], f"{path}/gated")
    merged = nodes.node("Reshape", [gated, nodes.integers(f"rows_{values}", [0, 0, values])], f"{path}/merge")
    return nodes.linear(merged, f"{path}/out")


def _silu(nodes: Nodes, x: str, path: str) -> str:
    return nodes.node("Mul", [x, nodes.node("Sigmoid", [x], f"{path}/sigmoid")], f"{path}/silu")


def _heads(nodes: Nodes, x: str, heads: int, dim: int, path: str) -> str:
    """[batch, sequence, heads * dim] → [batch, sequence, heads, dim]"""
    return nodes.node("Reshape", [x, nodes.integers(f"split_{heads}_{dim}", [0, 0, heads, dim])], f"{path}/heads")


def _keys(nodes: Nodes, x: str, mixer: LinearAttentionConfig, path: str) -> str:
    """Normed, queries scaled, each key head as often as value heads share it: [batch, sequence, heads, key_dim]"""
    split = _heads(nodes, x, mixer.key_heads, mixer.key_dim, path)
    square = nodes.node("Mul", [split, split], f"{path}/square")
    total = nodes.node("ReduceSum", [square, nodes.integers("axis_last", [-1])], f"{path}/sum", keepdims=1)
    eps = nodes.constant("const/l2_eps", np.float32(_L2_EPS))
    root = nodes.node("Sqrt", [nodes.node("Add", [total, eps], f"{path}/add_eps")], f"{path}/root")
    normed = nodes.node("Div", [split, root], f"{path}/normed")
    if path.endswith("/q"):
        scale = nodes.constant("const/linear_scale", np.float32(mixer.key_dim**-0.5))
        normed = nodes.node("Mul", [normed, scale], f"{path}/scaled")
    times = mixer.heads // mixer.key_heads
    if times == 1:
        return normed
    column = nodes.node("Unsqueeze", [normed, nodes.integers("axis_3", [3])], f"{path}/unsqueeze")
    shape = nodes.integers(f"times_{times}", [1, 1, 1, times, 1])
    repeated = nodes.node("Expand", [column, shape], f"{path}/expand")
    return _heads(nodes, repeated, mixer.heads, mixer.key_dim, f"{path}/repeated")


def delta_rule() -> onnx.GraphProto:
    """One token of the gated delta rule, the body of a Scan: state s [batch, heads, key_dim, value_dim]; q, k, v
    [batch, heads, .]; g, b [batch, heads].

    s = e^g s; s = s + outer(k, b (v - k s)); o = q s
    """
    steps = [
        ("Unsqueeze", ["g", "both"], "g_wide"),
        ("Exp", ["g_wide"], "fall"),
        ("Mul", ["s", "fall"], "kept"),
        ("Unsqueeze", ["k", "row"], "k_row"),
        ("MatMul", ["k_row", "kept"], "known"),
        ("Unsqueeze", ["v", "row"], "v_row"),
        ("Sub", ["v_row", "known"], "new"),
        ("Unsqueeze", ["b", "both"], "b_wide"),
        ("Mul", ["new", "b_wide"], "change"),
        ("Unsqueeze", ["k", "column"], "k_column"),
        ("MatMul", ["k_column", "change"], "added"),
        ("Add", ["kept", "added"], "s_next"),
        ("Unsqueeze", ["q", "row"], "q_row"),
        ("MatMul", ["q_row", "s_next"], "o_row"),
        ("Squeeze", ["o_row", "row"], "o"),
    ]
    axes = {"row": [2], "column": [3], "both": [2, 3]}
    return helper.make_graph(
        [helper.make_node(op, inputs, [output]) for op, inputs, output in steps],
        "delta_rule",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("s", "q", "k", "v", "g", "b")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("s_next", "o")],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in axes.items()],
    )
