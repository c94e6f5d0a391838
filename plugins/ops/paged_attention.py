"""Causal attention of each token over its sequence's blocks of the KV cache (MHA, GQA, MQA)."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.op import Array, Call, Op, Shapes


def reference(call: Call) -> tuple[Array, ...]:
    """y[t, h] = softmax(bent(scale * q[t, h] . K[first : position + 1])) @ V[first : position + 1]

    of KV head h // (heads / kv_heads); first = position + 1 - window, or 0 without a window; bent(s) =
    softcap * tanh(s / softcap), or s without a cap.

    Of an int8 cache K and V are codes times scales. Kernels multiply with the codes, in float32: the sum over the dims
    of (scale * q) . codes is multiplied by the token's key scale, then bent; a weight enters the sum of weights, then
    is multiplied by the token's value scale, then with the codes.
    """
    q, attrs = call.required(0), call.attrs
    starts, past_lengths, tables = (call.integers(index) for index in (1, 2, 3))
    heads, kv_heads, dim = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    window, cap = int(attrs["window"]), float(attrs["softcap"])
    out = np.empty_like(q)
    for s, past in enumerate(past_lengths):
        begin, end = starts[s], starts[s + 1]
        total = int(past + end - begin)
        blocks = tables[s, : -(-total // call.kv.layout.tokens_per_block)]
        keys, values = call.kv.read(int(attrs["layer"]), blocks, total)
        group = heads // kv_heads
        keys, values = np.repeat(keys, group, axis=1).astype(np.float64), np.repeat(values, group, axis=1)
        for t in range(begin, end):
            visible = int(past + t - begin + 1)
            first = max(0, visible - window) if window else 0
            scores = np.einsum("hd,nhd->hn", q[t].reshape(heads, dim), keys[first:visible]) * float(attrs["scale"])
            if cap:
                scores = cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[t] = np.einsum("hn,nhd->hd", weights, values[first:visible]).reshape(-1)
    return (out,)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """The soft cap must not be negative; 0 means that there is no cap."""
    softcap = float(attrs["softcap"])
    return None if softcap >= 0 else f"a soft cap of {softcap:g} is below 0"


OP = Op(
    name="paged_attention",
    inputs=("q", "query_starts", "past_lengths", "block_tables"),  # q [tokens, heads * head_dim]
    outputs=("y",),  # [tokens, heads * head_dim]
    attrs={"layer": int, "heads": int, "kv_heads": int, "head_dim": int, "scale": float, "window": 0, "softcap": 0.0},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    batch_inputs={1: 0, 2: 0, 3: 0},
    of_tokens=True,
)
