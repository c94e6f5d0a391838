"""Which experts each token takes, and what each of them weighs."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import is_flag
from ingot.plugins.op import Array, Call, Op, Shapes


def reference(call: Call) -> tuple[Array, ...]:
    """Each row takes the experts of its `per_token` largest logits, equal ones by lower number; they fill its slots in
    the order of their numbers. weights = softmax of the logits, normalized: of the taken ones alone.

    A NaN counts as infinite: its expert is taken, and all weights of the row are NaN.
    """
    logits, count = call.required(0), int(call.attrs["per_token"])
    keys = np.where(np.isnan(logits), np.float32(np.inf), logits)
    taken = np.sort(np.argsort(-keys, axis=1, kind="stable")[:, :count], axis=1)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        shares = np.exp(logits - keys.max(axis=1, keepdims=True, initial=-np.inf))
    weights = np.take_along_axis(shares, taken, axis=1)
    total = weights if call.attrs["normalized"] else shares
    return taken.astype(np.float32), weights / total.sum(axis=1, keepdims=True)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """A row takes at least one expert, and at most all of them."""
    (experts,) = shapes[0] or (0,)
    taken = int(attrs["per_token"])
    return None if 1 <= taken <= experts else f"a row cannot take {taken} of {experts} experts"


OP = Op(
    name="moe_route",
    inputs=("logits",),  # [rows, experts]
    outputs=("ids", "weights"),  # [rows, slots] each; ids are whole numbers
    attrs={"per_token": int, "normalized": int},
    out_cols=lambda cols, attrs: (int(attrs["per_token"]),) * 2,
    reference=reference,
    size_problem=size_problem,
    routes=True,
    attr_rules={"normalized": is_flag},
)
