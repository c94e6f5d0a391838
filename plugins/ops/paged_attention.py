"""Causal attention of each token over its sequence's blocks of the KV cache (MHA, GQA, MQA)."""

import numpy as np

from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """y[t, h] = softmax(scale * q[t, h] . K[: position + 1]) @ V[: position + 1], of KV head h // (heads / kv_heads)"""
    q, attrs, batch = call.required(0), call.attrs, call.batch
    heads, kv_heads, dim = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    out = np.empty_like(q)
    for s, past in enumerate(batch.past_lengths):
        begin, end = batch.query_starts[s], batch.query_starts[s + 1]
        total = int(past + end - begin)
        blocks = batch.block_tables[s, : -(-total // call.kv.layout.tokens_per_block)]
        keys, values = call.kv.read(int(attrs["layer"]), blocks, total)
        group = heads // kv_heads
        keys, values = np.repeat(keys, group, axis=1).astype(np.float64), np.repeat(values, group, axis=1)
        for t in range(begin, end):
            visible = int(past + t - begin + 1)
            scores = np.einsum("hd,nhd->hn", q[t].reshape(heads, dim), keys[:visible]) * float(attrs["scale"])
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[t] = np.einsum("hn,nhd->hd", weights, values[:visible]).reshape(-1)
    return (out,)


OP = Op(
    name="paged_attention",
    inputs=("q",),  # [tokens, heads * head_dim]
    outputs=("y",),  # [tokens, heads * head_dim]
    attrs={"layer": int, "heads": int, "kv_heads": int, "head_dim": int, "scale": float},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
)
