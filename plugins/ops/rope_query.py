"""Norms and rotates the queries of a layer that reads the keys and values of an earlier one."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import HEAD_RULES, is_flag, not_negative
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.ops.rope_kv_write import normed, rotate


def reference(call: Call) -> tuple[Array, ...]:
    """q = rotate(norm(q)), as rope_kv_write does"""
    q, cos_sin, attrs = call.required(0), call.optional(1), call.attrs
    heads, dim = int(attrs["heads"]), int(attrs["head_dim"])
    q = normed(q, call.optional(2), float(attrs["norm_eps"])).reshape(len(q), heads, dim)
    if cos_sin is not None:
        q = rotate(q, *np.split(cos_sin, 2, axis=-1), interleaved=bool(attrs["interleaved"]))
    return (np.ascontiguousarray(q.reshape(len(q), heads * dim)),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """The columns must fit the heads; a norm is as long as one head or as all heads."""
    heads, dim = int(attrs["heads"]), int(attrs["head_dim"])
    if shapes[1] is not None and shapes[1][0] not in range(2, dim + 1, 2):
        return f"{shapes[1][0]} rotary dimensions do not fit into a head of {dim}"
    if shapes[2] not in (None, (dim,), (heads * dim,)):
        return f"q_norm has shape {shapes[2]} instead of ({dim},), one head, or ({heads * dim},), all heads"
    return unequal("q", shapes[0], heads * dim)


OP = Op(
    name="rope_query",
    # [tokens, heads * head_dim], [tokens, rotary_dim], [head_dim] or [heads * head_dim]
    inputs=("q", "cos_sin?", "q_norm?"),
    outputs=("y",),  # [tokens, heads * head_dim]
    attrs={"heads": int, "head_dim": int, "interleaved": 0, "norm_eps": 0.0},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    attr_rules={
        **{name: HEAD_RULES[name] for name in ("heads", "head_dim")},
        "interleaved": is_flag,
        "norm_eps": not_negative,
    },
    vectors=(2,),
    of_tokens=True,
)
