"""Which experts each token takes, and what each of them weighs."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import is_flag, not_negative, one_of
from ingot.plugins.op import Array, Call, Op, Shapes, unequal


def reference(call: Call) -> tuple[Array, ...]:
    """Each row takes the experts of its `per_token` largest keys, equal ones by lower number; they fill its slots in
    the order of their numbers.

    softmax: keys are the logits, shares their softmax over all experts, or, normalized, over the taken ones alone.
    sigmoid: shares are sigmoid(logits), keys are shares + bias; normalized: shares / (sum of the taken ones + eps).
    weights = shares of the taken experts * scale.

    A NaN counts as infinite: its expert is taken. All weights of the row are NaN then, but those of sigmoids that are
    not normalized, where it is the expert's own.
    """
    logits, count = call.required(0), int(call.attrs["per_token"])
    sigmoid, normalized = call.attrs["score"] == "sigmoid", bool(call.attrs["normalized"])
    shares, bias = _sigmoid(logits) if sigmoid else logits, call.optional(1)
    keys = shares if bias is None else shares + bias
    keys = np.where(np.isnan(keys), np.float32(np.inf), keys)
    taken = np.sort(np.argsort(-keys, axis=1, kind="stable")[:, :count], axis=1)
    if not sigmoid:
        with np.errstate(invalid="ignore"):  # infinity less infinity
            shares = np.exp(logits - keys.max(axis=1, keepdims=True, initial=-np.inf))
    weights = np.take_along_axis(shares, taken, axis=1)
    if normalized or not sigmoid:
        total = (weights if normalized else shares).sum(axis=1, keepdims=True) + np.float32(call.attrs["eps"])
        with np.errstate(invalid="ignore"):  # no share at all
            weights = weights / total
    return taken.astype(np.float32), weights * np.float32(call.attrs["scale"])


def _sigmoid(x: Array) -> Array:
    z = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + z), z / (1 + z)).astype(np.float32)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """A row takes at least one expert, and at most all of them; only sigmoids have a bias."""
    (experts,), bias = shapes[0] or (0,), shapes[1]
    taken = int(attrs["per_token"])
    if bias is not None and attrs["score"] != "sigmoid":
        return "a softmax has no bias that only selects"
    return unequal("bias", bias, experts) or (
        None if 1 <= taken <= experts else f"a row cannot take {taken} of {experts} experts"
    )


OP = Op(
    name="moe_route",
    inputs=("logits", "bias?"),  # [rows, experts], [experts]
    outputs=("ids", "weights"),  # [rows, slots] each; ids are whole numbers
    attrs={"per_token": int, "normalized": int, "score": "softmax", "eps": 0.0, "scale": 1.0},
    out_cols=lambda cols, attrs: (int(attrs["per_token"]),) * 2,
    reference=reference,
    size_problem=size_problem,
    attr_rules={"normalized": is_flag, "score": one_of("softmax", "sigmoid"), "eps": not_negative},
    vectors=(1,),
)
