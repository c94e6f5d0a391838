"""Reads a Scan over the sequence that carries a state: the gated delta rule, or the gated rule of Mamba 2.

q, k, v  ← Reshape to heads ← parts of one tensor; q and k normed (delta rule) and repeated for the heads they serve
decay    = -exp(weight) * steps, steps = Softplus(.), for Mamba 2 also within bounds
"""

import dataclasses
from collections.abc import Sequence

import onnx_graphsurgeon as gs

from ingot.builder.graph import (
    Attr,
    Graph,
    is_op,
    is_weight,
    optional_input,
    producer,
    scalar,
    small_ints,
    weight_shape,
)
from ingot.plugins.ops.linear_attention import LARGEST_STEP

_MOST_NODES = 20  # of a body: others are not looked at, since the same term may stand in it many times


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """Queries or keys [batch, sequence, heads, dim], or values: what they were made of, and how."""

    source: gs.Tensor
    heads: int
    dim: int
    times: int = 1
    scale: float = 1.0
    eps: float = 0.0


def read_heads(tensor: gs.Tensor) -> tuple[gs.Tensor, int, int] | None:
    """(x, heads, dim) of x reshaped to [0, 0, heads, dim]."""
    node = producer(tensor)
    shape = small_ints(node.inputs[1]) if is_op(node, "Reshape") else None
    if node is None or shape is None or len(shape) != 4 or shape[:2] != [0, 0] or min(shape[2:]) < 1:
        return None
    return node.inputs[0], shape[2], shape[3]


def _read_keys(tensor: gs.Tensor) -> Keys | None:
    """None: not made as the rule's queries, keys or values are."""
    times, scale, eps = 1, 1.0, 0.0
    found = read_heads(tensor)
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
    made = read_heads(tensor)
    if made is None:
        return None
    return Keys(source=made[0], heads=made[1], dim=made[2], times=times, scale=scale, eps=eps)


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
    """The outputs of a Scan's body in terms of its inputs, whatever its names; none of a long body."""
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


def _rule(known: bool, by_dim: bool = False) -> tuple[str, str]:
    """State and output in terms of the inputs. known: what the state says of a key is subtracted from its value.
    by_dim: each dim of a key has a decay of its own."""

    def row(name: str) -> str:
        return _term("Unsqueeze", name, "[2]")

    kept = _term("Mul", "s", _term("Exp", _term("Unsqueeze", "g", "[3]" if by_dim else "[2, 3]")))
    new = _term("Sub", row("v"), _term("MatMul", row("k"), kept)) if known else row("v")
    change = _term("Mul", new, _term("Unsqueeze", "b", "[2, 3]"))
    state = _term("Add", kept, _term("MatMul", _term("Unsqueeze", "k", "[3]"), change))
    return state, _term("Squeeze", _term("MatMul", row("q"), state), "[2]")


_DELTA_RULE, _GATED_RULE, _DELTA_RULE_BY_DIM = _rule(True), _rule(False), _rule(True, by_dim=True)


def _joined(sides: Sequence[Keys]) -> gs.Tensor | str:
    """The tensor whose parts the sides are made of, in this order."""
    split = producer(sides[0].source)
    sizes = [side.heads * side.dim for side in sides]
    if not is_op(split, "Split") or len(split.outputs) != 3 or small_ints(optional_input(split, 1)) != sizes:
        return "q, k and v are not parts of one tensor"
    if any(each is not side.source for each, side in zip(split.outputs, sides, strict=True)):
        return "q, k and v do not lie in this order"
    joined: gs.Tensor = split.inputs[0]
    return joined


def _is_over_sequence(scan: gs.Node) -> bool:
    """Whether a scan runs over the tokens from the first one on."""
    is_reversed = any(scan.attrs.get("scan_output_directions", [0])) or any(
        scan.attrs.get("scan_input_directions", [0])
    )
    axes = scan.attrs.get("scan_input_axes"), scan.attrs.get("scan_output_axes")
    return not is_reversed and axes == ([1] * 5, [1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrence:
    """x: q, k and v side by side, or v, k and q. beta: before its sigmoid; None: the steps are the strengths."""

    x: gs.Tensor
    dt: gs.Tensor
    beta: gs.Tensor | None
    a_log: gs.Tensor
    attrs: dict[str, Attr]


def read_recurrence(graph: Graph, scan: gs.Node) -> Recurrence | str:
    """The parts of a scan of one of the rules, or why it is none."""
    if len(scan.inputs) != 6 or len(scan.outputs) != 2 or scan.attrs.get("num_scan_inputs") != 5:
        return "the scan has other inputs than a state, q, k, v, decay and strength"
    rule = _signature(scan.attrs["body"])
    if rule not in (_DELTA_RULE, _GATED_RULE, _DELTA_RULE_BY_DIM):
        return "the scan computes neither the gated delta rule nor that of Mamba 2"
    if not _is_over_sequence(scan):
        return "the scan does not run over the sequence"
    if graph.users(scan.outputs[0]):
        return "the last state is used"
    q, k, v = (_read_keys(tensor) for tensor in scan.inputs[1:4])
    if q is None or k is None or v is None or v.eps or v.times != 1 or k.scale != 1 or q.eps != k.eps:
        return "q, k and v are not made as those of linear attention"
    if (q.heads, q.dim, q.times) != (k.heads, k.dim, k.times) or q.heads * q.times != v.heads:
        return "the heads of q, k and v do not fit together"
    if not _fresh(scan.inputs[0], [v.heads, k.dim, v.dim]):
        return "the state does not begin with zeros"
    sides = (v, k, q) if rule == _GATED_RULE else (q, k, v)
    x = _joined(sides)
    if isinstance(x, str):
        return x
    steps = _read_steps(scan.inputs[4], scan.inputs[5] if rule == _GATED_RULE else None)
    if isinstance(steps, str):
        return steps
    dt = _read_dt(steps, v.heads, k.dim if rule == _DELTA_RULE_BY_DIM else 0)
    if dt is None:
        return "the decays are not those of heads, nor of their dims"
    strength = producer(scan.inputs[5])
    if rule != _GATED_RULE and not is_op(strength, "Sigmoid"):
        return "the strength is made otherwise"
    attrs: dict[str, Attr] = {
        "heads": v.heads,
        "key_heads": k.heads,
        "key_dim": k.dim,
        "value_dim": v.dim,
        "values_first": int(rule == _GATED_RULE),
        "scale": q.scale,
        "l2_eps": k.eps,
        "dt_min": steps.least,
        "dt_max": steps.most,
        "by_dim": int(rule == _DELTA_RULE_BY_DIM),
    }
    beta = strength.inputs[0] if strength is not None and rule != _GATED_RULE else None
    return Recurrence(x=x, dt=dt, beta=beta, a_log=steps.a_log, attrs=attrs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Steps:
    dt: gs.Tensor
    a_log: gs.Tensor
    least: float = 0.0
    most: float = LARGEST_STEP


def _read_steps(decay: gs.Tensor, strength: gs.Tensor | None) -> _Steps | str:
    """What a decay is made of. strength: where the steps are that too, else None."""
    node = producer(decay)
    if not is_op(node, "Mul"):
        return "the decay is not a product"
    sides: Sequence[gs.Tensor] = sorted(node.inputs, key=lambda each: is_op(producer(each), "Neg"))
    rate, made = producer(sides[1]), sides[0]
    exponential = producer(rate.inputs[0]) if is_op(rate, "Neg") else None
    if strength is not None and made is not strength:
        return "the steps of the decay are not those of the values"
    clip, least, most = producer(made), 0.0, LARGEST_STEP
    if is_op(clip, "Clip"):
        bounds = [scalar(each) for each in clip.inputs[1:3]]
        if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
            return "the bounds of the steps are not numbers"
        clip, least, most = producer(clip.inputs[0]), bounds[0], min(bounds[1], LARGEST_STEP)
    if not is_op(clip, "Softplus") or not is_op(exponential, "Exp") or not is_weight(exponential.inputs[0]):
        return "the decay is no -exp(weight) * softplus(.)"
    return _Steps(dt=clip.inputs[0], a_log=exponential.inputs[0], least=least, most=most)


def _read_dt(steps: _Steps, heads: int, dim: int) -> gs.Tensor | None:
    """What the steps of heads are made of, or with `dim` those of so many dims of each."""
    if not dim:
        return steps.dt if weight_shape(steps.a_log) == (heads,) else None
    split = read_heads(steps.dt)
    fits = weight_shape(steps.a_log) == (1, 1, heads, 1) and split is not None and split[1:] == (heads, dim)
    return split[0] if split is not None and fits else None


def _fresh(tensor: gs.Tensor, shape: list[int]) -> bool:
    """Whether a tensor is zeros of [batch, *shape]."""
    node = producer(tensor)
    sizes = producer(node.inputs[0]) if is_op(node, "ConstantOfShape") and "value" not in node.attrs else None
    return is_op(sizes, "Concat") and len(sizes.inputs) == 2 and small_ints(sizes.inputs[1]) == shape
