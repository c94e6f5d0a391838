"""Which experts each token takes, and what each of them weighs."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.activations import sigmoid
from ingot.plugins.attributes import LARGEST, between, is_flag, not_negative, one_of
from ingot.plugins.op import Array, Call, Op, Shapes, unequal


def reference(call: Call) -> tuple[Array, ...]:
    """Each row takes the experts of its `per_token` largest keys, equal ones by lower number; they fill its slots in
    the order of their numbers.

    shares  softmax or sigmoid of the logits
    keys    shares + bias; of a softmax without bias and groups the logits, so that no exponential decides
    groups  more than 1: experts of `group_top` groups are taken, those with the largest sums of their `group_best`
            best keys
    weight  share * scale; normalized: share / (max(sum of the taken ones, floor) + eps) * scale

    A NaN counts as infinite: its expert is taken. Every weight of the row is NaN then, but those of sigmoids that are
    not normalized, where it is the expert's own.
    """
    logits, bias, attrs = call.required(0), call.optional(1), call.attrs
    shares = sigmoid(logits) if attrs["score"] == "sigmoid" else _softmax(logits)
    if bias is not None:
        keys = shares + bias
    else:
        keys = shares if attrs["score"] == "sigmoid" or int(attrs["groups"]) > 1 else logits
    keys = _of_best_groups(_infinite(keys), *(int(attrs[each]) for each in ("groups", "group_top", "group_best")))
    taken = np.sort(np.argsort(-keys, axis=1, kind="stable")[:, : int(attrs["per_token"])], axis=1)
    weights = np.take_along_axis(shares, taken, axis=1)
    if attrs["normalized"]:
        total = np.maximum(weights.sum(axis=1, keepdims=True), np.float32(attrs["floor"])) + np.float32(attrs["eps"])
        with np.errstate(invalid="ignore"):  # no share at all
            weights = weights / total
    return taken.astype(np.float32), weights * np.float32(attrs["scale"])


def _softmax(logits: Array) -> Array:
    with np.errstate(invalid="ignore"):  # infinity less infinity
        shares: Array = np.exp(logits - _infinite(logits).max(axis=1, keepdims=True, initial=-np.inf))
        normalized: Array = shares / shares.sum(axis=1, keepdims=True)
    return normalized


def _infinite(keys: Array) -> Array:
    return np.where(np.isnan(keys), np.float32(np.inf), keys)


def _of_best_groups(keys: Array, groups: int, top: int, best: int) -> Array:
    """-infinity for the keys of all other groups."""
    if groups == 1:
        return keys
    grouped = keys.reshape(len(keys), groups, -1)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        sums = _infinite(np.sort(grouped, axis=2)[:, :, -best:].sum(axis=2))
    chosen = np.zeros(sums.shape, np.bool_)
    np.put_along_axis(chosen, np.argsort(-sums, axis=1, kind="stable")[:, :top], values=True, axis=1)
    return np.where(chosen[:, :, None], grouped, np.float32(-np.inf)).reshape(keys.shape)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """A row takes at least one expert, and at most all that it may choose from."""
    (experts,) = shapes[0] or (0,)
    taken, groups, top, best = (int(attrs[key]) for key in ("per_token", "groups", "group_top", "group_best"))
    if groups > 1 and (experts % groups or experts < best * groups):
        return f"{experts} experts cannot be shared evenly among {groups} groups of {best} or more"
    if top > groups:
        return f"a row cannot take experts of {top} groups of {groups}"
    most = experts * top // groups
    return unequal("bias", shapes[1], experts) or (
        None if 1 <= taken <= most else f"a row cannot take {taken} of {most} experts"
    )


OP = Op(
    name="moe_route",
    inputs=("logits", "bias?"),  # [rows, experts], [experts]
    outputs=("ids", "weights"),  # [rows, slots] each; ids are whole numbers
    attrs={
        "per_token": int,
        "normalized": int,
        "score": "softmax",
        "eps": 0.0,
        "floor": 0.0,
        "scale": 1.0,
        "groups": 1,
        "group_top": 1,
        "group_best": 2,
    },
    out_cols=lambda cols, attrs: (int(attrs["per_token"]),) * 2,
    reference=reference,
    size_problem=size_problem,
    routes=True,
    decisive=(0,),
    attr_rules={
        "normalized": is_flag,
        "score": one_of("softmax", "sigmoid"),
        "eps": not_negative,
        "floor": not_negative,
        "groups": between(1, LARGEST),
        "group_top": between(1, LARGEST),
        "group_best": between(1, 3),
    },
    vectors=(1,),
)
