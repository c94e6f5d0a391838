"""Residual streams get the root mean square of another one."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import between, is_flag, not_negative
from ingot.plugins.op import Array, Call, Op, Shapes
from ingot.plugins.ops.mix_streams import MOST


def reference(call: Call) -> tuple[Array, ...]:
    """y[t, i] = x[t, i] * sqrt(mean(like[t]^2)) / sqrt(max(mean(x[t, i]^2), least)); joins: `like` comes first"""
    x, like, attrs = call.required(0), call.required(1), call.attrs
    streams = x.reshape(len(x), int(attrs["streams"]), -1).astype(np.float64)
    squares = np.maximum((streams**2).mean(axis=2, keepdims=True), float(attrs["least"]))
    wanted = np.sqrt((like.astype(np.float64) ** 2).mean(axis=1))[:, None, None]
    y = (streams * (wanted / np.sqrt(squares))).reshape(x.shape).astype(np.float32)
    return (np.concatenate([like, y], axis=1) if attrs["joins"] else y,)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Each stream is as wide as the one whose magnitude it gets."""
    (cols,), like, count = shapes[0] or (0,), shapes[1], int(attrs["streams"])
    if (like is not None and like != (cols // count,)) or cols % count:
        return f"{cols} columns are no {count} streams as wide as {like}"
    return None


OP = Op(
    name="match_magnitude",
    inputs=("x", "like"),  # [rows, streams * n], [rows, n]
    outputs=("y",),  # [rows, streams * n], with one more where it joins
    attrs={"streams": int, "joins": int, "least": float},
    out_cols=lambda cols, attrs: ((cols[0] or 0) + (cols[1] or 0) * int(attrs["joins"]),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={"streams": between(1, MOST + 1), "joins": is_flag, "least": not_negative},
)
