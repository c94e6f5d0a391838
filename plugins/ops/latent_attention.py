"""Causal attention over a cache of latents: every head reads the same rows, whose first numbers are the values too.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1, with the products of keys and values absorbed.
"""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import LATENT_RULES
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.work import OpUse
from ingot.step_work import Work


def reference(call: Call) -> tuple[Array, ...]:
    """y[t, h] = softmax(scale * q[t, h] . K[: position + 1]) @ K[: position + 1, :rank]"""
    q, attrs = call.required(0), call.attrs
    starts, past_lengths, (kv, tables) = call.integers(1), call.integers(2), call.cache(3)
    heads, width, rank = int(attrs["heads"]), int(attrs["head_dim"]), int(attrs["rank"])
    size, out = kv.group.tokens_per_block, np.empty((len(q), heads, rank), np.float32)
    for s, past in enumerate(past_lengths):
        begin, end = starts[s], starts[s + 1]
        rows, _ = kv.read(int(attrs["layer"]), tables[s, : -(-int(past + end - begin) // size)])
        keys = rows[:, 0].astype(np.float64)
        for t in range(begin, end):
            seen = keys[: int(past + t - begin + 1)]
            scores = q[t].reshape(heads, width) @ seen.T * float(attrs["scale"])
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[t] = weights / weights.sum(axis=-1, keepdims=True) @ seen[:, :rank]
    return (out.reshape(len(q), -1),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Queries are as wide as the cache's rows."""
    heads, width, rank = (int(attrs[name]) for name in ("heads", "head_dim", "rank"))
    if rank >= width:
        return f"a rank of {rank} leaves nothing of {width} numbers to rotate"
    return unequal("q", shapes[0], heads * width)


def work(use: OpUse) -> Work:
    """Rows that any token of a sequence sees are read once."""
    tokens = sum(past + count for past, count in use.load.sequences)
    pairs = sum(count * past + count * (count + 1) // 2 for past, count in use.load.sequences)
    width = int(use.attrs["head_dim"]) + int(use.attrs["rank"])
    nbytes = use.activation_bytes + tokens * use.kv_bytes_per_token
    return Work(nbytes=nbytes, operations=2 * pairs * int(use.attrs["heads"]) * width)


OP = Op(
    name="latent_attention",
    inputs=("q", "query_starts", "past_lengths", "block_tables"),  # q [tokens, heads * head_dim]
    outputs=("y",),  # [tokens, heads * rank]
    attrs={"layer": int, "heads": int, "kv_heads": 1, "head_dim": int, "rank": int, "scale": float},
    out_cols=lambda cols, attrs: (int(attrs["heads"]) * int(attrs["rank"]),),
    reference=reference,
    size_problem=size_problem,
    attr_rules=LATENT_RULES,
    work=work,
    uses_kv=True,
    latent=True,
    batch_inputs={1: 0, 2: 0, 3: 0},
    of_tokens=True,
)
