"""From the weights of a token's experts back to the router's logits: which experts it takes, and what they weigh.

    logits ─ Softmax or Sigmoid ┬ [+ bias] ─ [-inf outside of the best groups] ─ TopK
                                └ its values, or GatherElements at its places ─ [/ their sum] ─ [* scale]

The sum may count as at least some number (Max), and a number may be added to it.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.graph import is_op, is_weight, optional_input, producer, scalar, small_ints, weight_shape

Attr = int | float | str

_SCORES = {"Softmax": "softmax", "Sigmoid": "sigmoid"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a TopK takes its experts by, and where from.

    top     the TopK
    score   softmax or sigmoid
    logits, shares, keys  [batch, sequence, experts] each; keys: with the bias, before groups are left out
    bias    [experts], None without
    best    the TopK that takes groups, None without; groups: how many there are; ranked: by so many of their best
    """

    top: gs.Node
    score: str
    logits: gs.Tensor
    shares: gs.Tensor
    keys: gs.Tensor
    bias: gs.Tensor | None
    best: gs.Node | None
    groups: int
    ranked: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """logits, bias: what MoeRoute takes. attrs: its attributes. shares: [batch, sequence, experts]"""

    shares: gs.Tensor
    logits: gs.Tensor
    bias: gs.Tensor | None
    attrs: Mapping[str, Attr]


def read_route(weights: gs.Tensor, places: gs.Tensor) -> Route | str:
    """The route whose weights are scattered to these places, or why it is none."""
    scale = 1.0
    if (node := _maker(weights, "Mul")) is not None:
        number = next((index for index, each in enumerate(node.inputs) if scalar(each) is not None), None)
        if number is None:
            return "the weights are multiplied by more than a number"
        weights, scale = node.inputs[1 - number], scalar(node.inputs[number]) or 0.0
    total = None
    if (node := _maker(weights, "Div")) is not None:
        weights, total = node.inputs
    top = _maker(places, "TopK")
    choice = "the weights are not the largest of some" if top is None else read_choice(top)
    if isinstance(choice, str):
        return choice
    if places is not choice.top.outputs[1]:
        return "the weights go elsewhere than where they come from"
    if not _are_shares(weights, choice):
        return "the weights go elsewhere than where they come from"
    sums = _read_total(total, weights) if total is not None else (0.0, 0.0)
    if isinstance(sums, str):
        return sums
    (taken,), group_top = _count(choice.top), 1 if choice.best is None else _count(choice.best)[0]
    attrs: dict[str, Attr] = {
        "per_token": taken,
        "normalized": int(total is not None),
        "score": choice.score,
        "floor": sums[0],
        "eps": sums[1],
        "scale": scale,
        "groups": choice.groups,
        "group_top": group_top,
        "group_best": choice.ranked,
    }
    return Route(shares=choice.shares, logits=choice.logits, bias=choice.bias, attrs=attrs)


def read_choice(top: gs.Node) -> Choice | str:
    """What a TopK takes experts by, or why it takes none."""
    if len(_count(top)) != 1 or top.attrs.get("axis", -1) not in (-1, 2) or not top.attrs.get("largest", 1):
        return "the experts taken are not a fixed number of the largest"
    keys, best, groups, ranked = top.inputs[0], None, 1, 2
    if (ungrouped := _maker(keys, "Reshape")) is not None:
        found = _read_groups(ungrouped)
        if isinstance(found, str):
            return found
        keys, best, groups, ranked = found
    shares, bias, node = keys, None, producer(keys)
    wrong = "the experts are not taken by a softmax over all, nor by sigmoids"
    if node is not None and is_op(node, "Add"):
        weights = [each for each in node.inputs if is_weight(each)]
        if len(weights) != 1 or len(weight_shape(weights[0])) != 1:
            return "the experts are chosen by more than shares and a bias"
        (bias,), (shares,) = weights, [each for each in node.inputs if each is not weights[0]]
        node = producer(shares)
    if node is None or node.op not in _SCORES or not is_op(node, node.op):
        return wrong
    if node.op == "Softmax" and node.attrs.get("axis", -1) not in (-1, 2):
        return wrong
    return Choice(
        top=top,
        score=_SCORES[node.op],
        logits=node.inputs[0],
        shares=shares,
        keys=keys,
        bias=bias,
        best=best,
        groups=groups,
        ranked=ranked,
    )


def _are_shares(weights: gs.Tensor, choice: Choice) -> bool:
    """Whether the weights are the shares of the experts taken."""
    if weights is choice.top.outputs[0]:
        return choice.shares is choice.top.inputs[0]
    node = producer(weights)
    return (
        node is not None
        and is_op(node, "GatherElements")
        and node.inputs[0] is choice.shares
        and node.inputs[1] is choice.top.outputs[1]
        and node.attrs.get("axis", 0) in (-1, 2)
    )


def _read_total(total: gs.Tensor, weights: gs.Tensor) -> tuple[float, float] | str:
    """(what the sum counts as at least, what is added to it) where `total` is the sum of the weights."""
    numbers = {"Max": 0.0, "Add": 0.0}
    node = producer(total)
    for op in ("Add", "Max"):
        if node is not None and is_op(node, op):
            number = scalar(node.inputs[1]) if len(node.inputs) == 2 else None
            if number is None or number < 0:
                return "the weights are not divided by their sum"
            numbers[op], node = number, producer(node.inputs[0])
    if node is None or not is_op(node, "ReduceSum") or node.inputs[0] is not weights:
        return "the weights are not divided by their sum"
    if small_ints(optional_input(node, 1)) not in ([-1], [2]) or not node.attrs.get("keepdims", 1):
        return "the weights are not divided by their sum"
    return numbers["Max"], numbers["Add"]


def _read_groups(ungrouped: gs.Node) -> tuple[gs.Tensor, gs.Node, int, int] | str:
    """(the keys of all experts, the TopK of groups, number of groups, how many of their best rank them): Where a group
    is taken, else minus infinity."""
    wrong = "the experts are left out in another way than by groups"
    where = _maker(ungrouped.inputs[0], "Where")
    if where is None or scalar(where.inputs[2]) != -np.inf:
        return wrong
    split, column = _maker(where.inputs[1], "Reshape"), _maker(where.inputs[0], "Unsqueeze")
    shape = small_ints(optional_input(split, 1)) if split is not None else None
    if split is None or shape is None or len(shape) != 4 or shape[:2] != [0, 0] or min(shape) < 0:
        return wrong
    if small_ints(optional_input(ungrouped, 1)) != [0, 0, shape[2] * shape[3]]:
        return wrong
    if column is None or small_ints(optional_input(column, 1)) not in ([-1], [3]):
        return wrong
    chosen = _marked(column.inputs[0])
    sums = _maker(chosen.inputs[0], "ReduceSum") if chosen is not None else None
    best = _maker(sums.inputs[0], "TopK") if sums is not None else None
    if chosen is None or sums is None or best is None:
        return wrong
    summed = small_ints(optional_input(sums, 1)) in ([-1], [3]) and not sums.attrs.get("keepdims", 1)
    few = _count(best) in ([1], [2]) and best.attrs.get("axis", -1) in (-1, 3) and best.attrs.get("largest", 1)
    if not summed or not few or best.inputs[0] is not where.inputs[1] or sums.inputs[0] is not best.outputs[0]:
        return "groups are not ranked by the sum of their one or two best"
    return split.inputs[0], chosen, shape[2], _count(best)[0]


def _marked(mask: gs.Tensor) -> gs.Node | None:
    """The TopK whose places a mask is true at, and nowhere else."""
    cast = _maker(mask, "Cast")
    scatter = _maker(cast.inputs[0], "ScatterElements") if cast is not None else None
    top = _maker(scatter.inputs[1], "TopK") if scatter is not None else None
    if scatter is None or top is None or scatter.inputs[1] is not top.outputs[1]:
        return None
    if scatter.attrs.get("axis", 0) not in (-1, 2) or scatter.attrs.get("reduction", "none") != "none":
        return None
    zeros, ones = read_fill(scatter.inputs[0]), read_fill(scatter.inputs[2])
    if zeros is None or ones is None or zeros[1] != 0 or ones[1] != 1:
        return None
    if zeros[0] is not top.inputs[0] or not any(ones[0] is each for each in top.outputs):
        return None
    fits = len(_count(top)) == 1 and top.attrs.get("axis", -1) in (-1, 2) and top.attrs.get("largest", 1)
    return top if fits else None


def read_fill(tensor: gs.Tensor) -> tuple[gs.Tensor, float] | None:
    """(x, the number) where a tensor has the shape of x and one number everywhere."""
    node = _maker(tensor, "ConstantOfShape")
    shape = _maker(node.inputs[0], "Shape") if node is not None else None
    if node is None or shape is None or len(shape.attrs):
        return None
    value = node.attrs.get("value")
    return shape.inputs[0], 0.0 if value is None else float(np.asarray(value.values).reshape(-1)[0])


def _maker(tensor: gs.Tensor, op: str) -> gs.Node | None:
    node = producer(tensor)
    return node if is_op(node, op) else None


def _count(top: gs.Node) -> list[int]:
    return small_ints(optional_input(top, 1)) or []
