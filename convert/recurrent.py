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

from ingot.configs.mixers import LinearAttentionConfig, Mamba2Config, ShortConvConfig
from ingot.configs.model import ModelConfig

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
        return _linear_shapes(mixer, hidden, f"{path}/linear")
    if isinstance(mixer, ShortConvConfig):
        biases = {f"{path}/conv/{name}/bias": (hidden,) for name in ("b", "c", "x", "conv", "out") if mixer.bias}
        return {
            **{f"{path}/conv/{name}/weight": (hidden, hidden) for name in ("b", "c", "x", "out")},
            f"{path}/conv/conv/weight": (hidden, 1, mixer.width),
            **biases,
        }
    return _mamba_shapes(mixer, hidden, f"{path}/mamba") if mixer is not None else {}


def _linear_shapes(mixer: LinearAttentionConfig, hidden: int, path: str) -> dict[str, Shape]:
    keys, values, rank = mixer.key_heads * mixer.key_dim, mixer.heads * mixer.value_dim, mixer.low_rank
    steps = mixer.heads * (mixer.key_dim if rank else 1)
    return {
        f"{path}/qkv/weight": (2 * keys + values, hidden),
        **({f"{path}/{name}_low/weight": (rank, hidden) for name in ("z", "dt")} if rank else {}),
        f"{path}/z/weight": (values, rank or hidden),
        f"{path}/b/weight": (mixer.heads, hidden),
        f"{path}/dt/weight": (steps, rank or hidden),
        f"{path}/dt/bias": (steps,),
        f"{path}/a_log/weight": (1, 1, mixer.heads, 1) if rank else (mixer.heads,),
        f"{path}/conv/weight": (2 * keys + values, 1, mixer.conv_width),
        f"{path}/norm/weight": (mixer.value_dim,),
        f"{path}/out/weight": (hidden, values),
    }


def _mamba_shapes(mixer: Mamba2Config, hidden: int, path: str) -> dict[str, Shape]:
    inner, channels = mixer.heads * mixer.head_dim, _mamba_channels(mixer)
    products = {"z": (inner, hidden), "xbc": (channels, hidden), "dt": (mixer.heads, hidden), "out": (hidden, inner)}
    return {
        **{f"{path}/{name}/weight": shape for name, shape in products.items()},
        **{f"{path}/{name}/bias": products[name][:1] for name in ("z", "xbc") if mixer.bias},
        **({f"{path}/dt_in/bias": (mixer.heads,)} if mixer.bias else {}),
        **({f"{path}/out/bias": (hidden,)} if mixer.out_bias else {}),
        f"{path}/dt/bias": (mixer.heads,),
        f"{path}/a_log/weight": (mixer.heads,),
        f"{path}/d/weight": (mixer.heads,),
        f"{path}/conv/weight": (channels, 1, mixer.conv_width),
        **({f"{path}/conv/bias": (channels,)} if mixer.conv_bias else {}),
        **({f"{path}/norm/weight": (inner,)} if mixer.norm_groups else {}),
    }


def _mamba_channels(mixer: Mamba2Config) -> int:
    """Columns that the convolution runs over: the values, and input and output vectors of each group."""
    return mixer.heads * mixer.head_dim + 2 * mixer.groups * mixer.state_dim


def recurrent_mixer(nodes: Nodes, x: str, config: ModelConfig, layer: int) -> str | None:
    """What the layer's mixer adds to the residual stream, [batch, sequence, hidden]; None where it has none."""
    if isinstance(mixer := config.mixer_of(layer), LinearAttentionConfig):
        return _linear_attention(nodes, x, mixer, config, f"layers.{layer}/linear")
    if isinstance(mixer, ShortConvConfig):
        return _short_conv(nodes, x, mixer, config, f"layers.{layer}/conv")
    return None if mixer is None else _mamba(nodes, x, mixer, config, f"layers.{layer}/mamba")


def _conv(
    nodes: Nodes, x: str, channels: int, width: int, path: str, *, bias: bool = False, factors: np.ndarray | None = None
) -> str:
    """Each channel over the last `width` tokens, [batch, sequence, channels]. factors [channels, 1, 1]: of x."""
    transposed = nodes.node("Transpose", [x], f"{path}/turn", perm=[0, 2, 1])
    weight = nodes.float32(f"{path}/weight")
    if factors is not None:
        weight = nodes.node("Mul", [weight, nodes.constant("const/conv_factors", factors)], f"{path}/factor")
    inputs = [transposed, weight, *([nodes.float32(f"{path}/bias")] if bias else [])]
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
    split_sizes = nodes.integers("linear_sizes", [keys, keys, values])
    nodes.nodes.append(helper.make_node("Split", [mixed, split_sizes], parts, f"{path}/split", axis=-1))
    query, key = (_keys(nodes, part, mixer, f"{path}/{name}") for part, name in zip(parts, ("q", "k"), strict=False))
    value = _heads(nodes, parts[2], mixer.heads, mixer.value_dim, f"{path}/v")
    through = {name: nodes.linear(x, f"{path}/{name}_low") if mixer.low_rank else x for name in ("dt", "z")}
    steps = nodes.linear(through["dt"], f"{path}/dt")
    if mixer.low_rank:
        steps = _heads(nodes, steps, mixer.heads, mixer.key_dim, f"{path}/dt")
    steps = nodes.node("Softplus", [steps], f"{path}/softplus")
    strength = nodes.node("Sigmoid", [nodes.linear(x, f"{path}/b")], f"{path}/strength")
    sizes = [mixer.heads, mixer.key_dim, mixer.value_dim]
    rule = delta_rule(by_dim=mixer.low_rank > 0)
    out = _scan(nodes, rule, [query, key, value, _decay(nodes, steps, path), strength], sizes, path)
    weight = nodes.float32(f"{path}/norm/weight")
    normed = nodes.node("RMSNormalization", [out, weight], f"{path}/norm", axis=-1, epsilon=config.norm_eps)
    gate = _heads(nodes, nodes.linear(through["z"], f"{path}/z"), mixer.heads, mixer.value_dim, f"{path}/z")
    gate = nodes.node("Sigmoid", [gate], f"{path}/z/sigmoid") if mixer.low_rank else _silu(nodes, gate, f"{path}/z")
    gated = nodes.node("Mul", [normed, gate], f"{path}/gated")
    merged = nodes.node("Reshape", [gated, nodes.integers(f"rows_{values}", [0, 0, values])], f"{path}/merge")
    return nodes.linear(merged, f"{path}/out")


def _mamba(nodes: Nodes, x: str, mixer: Mamba2Config, config: ModelConfig, path: str) -> str:
    inner, vectors = mixer.heads * mixer.head_dim, mixer.groups * mixer.state_dim
    channels = _mamba_channels(mixer)
    gate_scale, *mixed_scales, step_scale = mixer.part_scales or (1.0,) * 5
    x = times(nodes, x, mixer.in_scale, f"{path}/in")
    factors = np.repeat(np.array(mixed_scales, np.float32), [inner, vectors, vectors]).reshape(-1, 1, 1)
    mixed = _conv(
        nodes,
        nodes.linear(x, f"{path}/xbc"),
        channels,
        mixer.conv_width,
        f"{path}/conv",
        bias=mixer.conv_bias,
        factors=factors if mixer.part_scales else None,
    )
    parts = [f"{path}/{name}/split" for name in ("v", "k", "q")]
    sizes = nodes.integers("mamba_sizes", [inner, vectors, vectors])
    nodes.nodes.append(
        helper.make_node("Split", [_silu(nodes, mixed, f"{path}/conv"), sizes], parts, f"{path}/split", axis=-1)
    )
    value = _heads(nodes, parts[0], mixer.heads, mixer.head_dim, f"{path}/v")
    groups, dim = mixer.groups, mixer.state_dim
    key, query = (
        _repeated(nodes, _heads(nodes, part, groups, dim, path_of), groups, mixer.heads, dim, path_of)
        for part, path_of in zip(parts[1:], (f"{path}/k", f"{path}/q"), strict=True)
    )
    steps = nodes.node("Softplus", [_mamba_steps(nodes, x, mixer, step_scale, path)], f"{path}/softplus")
    if mixer.least_step or mixer.most_step:
        most = mixer.most_step or np.finfo(np.float32).max
        bounds = [
            nodes.constant(f"const/{n}_step", np.float32(v)) for n, v in (("least", mixer.least_step), ("most", most))
        ]
        steps = nodes.node("Clip", [steps, *bounds], f"{path}/steps")
    state = [mixer.heads, mixer.state_dim, mixer.head_dim]
    out = _scan(nodes, gated_rule(), [query, key, value, _decay(nodes, steps, path), steps], state, path)
    factor = nodes.node(
        "Reshape", [nodes.float32(f"{path}/d/weight"), nodes.integers("column", [-1, 1])], f"{path}/d/column"
    )
    out = nodes.node("Add", [out, nodes.node("Mul", [value, factor], f"{path}/skip")], f"{path}/with_skip")
    rows = nodes.integers(f"rows_{inner}", [0, 0, inner])
    merged = nodes.node("Reshape", [out, rows], f"{path}/merge")
    gate = times(nodes, nodes.linear(x, f"{path}/z"), gate_scale, f"{path}/z")
    gated = nodes.node("Mul", [merged, _silu(nodes, gate, f"{path}/z")], f"{path}/gated")
    return nodes.linear(_grouped_norm(nodes, gated, mixer, config, f"{path}/norm"), f"{path}/out")


def _mamba_steps(nodes: Nodes, x: str, mixer: Mamba2Config, scale: float, path: str) -> str:
    """Before their softplus: scale * (product + its bias) + bias, with the factor last; [batch, sequence, heads]"""
    bias = nodes.float32(f"{path}/dt/bias")
    if scale != 1:
        inverse = nodes.constant("const/inverse_step_scale", np.float32(1 / scale))
        bias = nodes.node("Mul", [bias, inverse], f"{path}/dt/unscaled_bias")
    if mixer.bias:
        bias = nodes.node("Add", [bias, nodes.float32(f"{path}/dt_in/bias")], f"{path}/dt/both_biases")
    weight = nodes.node("Transpose", [nodes.float32(f"{path}/dt/weight")], f"{path}/dt/transpose", perm=[1, 0])
    product = nodes.node("MatMul", [x, weight], f"{path}/dt/matmul")
    return times(nodes, nodes.node("Add", [product, bias], f"{path}/dt/add_bias"), scale, f"{path}/dt")


def _grouped_norm(nodes: Nodes, x: str, mixer: Mamba2Config, config: ModelConfig, path: str) -> str:
    """Root mean squares over each group of columns, then a factor for every column."""
    if not mixer.norm_groups:
        return x
    weight = nodes.float32(f"{path}/weight")
    if mixer.norm_groups == 1:
        return nodes.node("RMSNormalization", [x, weight], path, axis=-1, epsilon=config.norm_eps)
    inner = mixer.heads * mixer.head_dim
    size = inner // mixer.norm_groups
    split = nodes.node("Reshape", [x, nodes.integers("norm_groups", [0, 0, mixer.norm_groups, size])], f"{path}/groups")
    ones = nodes.constant("const/norm_ones", np.ones(size, np.float32))
    normed = nodes.node("RMSNormalization", [split, ones], path, axis=-1, epsilon=config.norm_eps)
    joined = nodes.node("Reshape", [normed, nodes.integers(f"rows_{inner}", [0, 0, inner])], f"{path}/merge")
    return nodes.node("Mul", [joined, weight], f"{path}/scaled")


def _decay(nodes: Nodes, steps: str, path: str) -> str:
    """What the state is multiplied by, as the exponent: [batch, sequence, heads]"""
    rate = nodes.node("Neg", [nodes.node("Exp", [nodes.float32(f"{path}/a_log/weight")], f"{path}/exp")], f"{path}/neg")
    return nodes.node("Mul", [steps, rate], f"{path}/decay")


def _scan(nodes: Nodes, body: onnx.GraphProto, tensors: Sequence[str], state: Sequence[int], path: str) -> str:
    """q, k, v, decay and strength of every token through a rule, from a state of zeros: [batch, sequence, heads, .]"""
    batch = nodes.node("Gather", ["positions/shape", nodes.integers("first", [0])], f"{path}/batch", axis=0)
    shape = nodes.node("Concat", [batch, nodes.integers("state_shape", state)], f"{path}/state_shape", axis=0)
    inputs = [nodes.node("ConstantOfShape", [shape], f"{path}/state"), *tensors]
    out = f"{path}/scan"
    nodes.nodes.append(
        helper.make_node(
            "Scan",
            inputs,
            [f"{path}/last_state", out],
            out,
            body=body,
            num_scan_inputs=5,
            scan_input_axes=[1] * 5,
            scan_output_axes=[1],
        )
    )
    return out


def times(nodes: Nodes, x: str, factor: float, path: str) -> str:
    """x times a number, which is not a node where it is 1."""
    if factor == 1:
        return x
    return nodes.node("Mul", [x, nodes.constant(f"const/factor_{factor!r}", np.float32(factor))], f"{path}/scale")


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
    return _repeated(nodes, normed, mixer.key_heads, mixer.heads, mixer.key_dim, path)


def _repeated(nodes: Nodes, x: str, shared: int, heads: int, dim: int, path: str) -> str:
    """[batch, sequence, shared, dim] → [batch, sequence, heads, dim], each head for those that share it"""
    times = heads // shared
    if times == 1:
        return x
    column = nodes.node("Unsqueeze", [x, nodes.integers("axis_3", [3])], f"{path}/unsqueeze")
    shape = nodes.integers(f"times_{times}", [1, 1, 1, times, 1])
    repeated = nodes.node("Expand", [column, shape], f"{path}/expand")
    return _heads(nodes, repeated, heads, dim, f"{path}/repeated")


def delta_rule(*, by_dim: bool = False) -> onnx.GraphProto:
    """One token of the gated delta rule, the body of a Scan: state s [batch, heads, key_dim, value_dim]; q, k, v
    [batch, heads, .]; g, b [batch, heads]. by_dim: g [batch, heads, key_dim]

    s = e^g s; s = s + outer(k, b (v - k s)); o = q s
    """
    new = [
        ("Unsqueeze", ["k", "row"], "k_row"),
        ("MatMul", ["k_row", "kept"], "known"),
        ("Unsqueeze", ["v", "row"], "v_row"),
        ("Sub", ["v_row", "known"], "new"),
    ]
    return _body("delta_rule", new, "column" if by_dim else "both")


def gated_rule() -> onnx.GraphProto:
    """One token of the rule of Mamba 2: as the delta rule, but s = s + outer(k, b v)."""
    return _body("gated_rule", [("Unsqueeze", ["v", "row"], "new")])


def _body(name: str, new: Sequence[tuple[str, list[str], str]], widened: str = "both") -> onnx.GraphProto:
    """new: what makes the value that is added, of v and of what the state keeps. widened: axes that g lacks."""
    steps = [
        ("Unsqueeze", ["g", widened], "g_wide"),
        ("Exp", ["g_wide"], "fall"),
        ("Mul", ["s", "fall"], "kept"),
        *new,
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
        name,
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in ("s", "q", "k", "v", "g", "b")],
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in ("s_next", "o")],
        [numpy_helper.from_array(np.array(value, np.int64), each) for each, value in axes.items()],
    )
