"""The first half of multi-head latent attention: the latent that all heads share is normed and written to the KV cache
with its rotated key; queries are rotated.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
"""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import LARGEST, LATENT_RULES, between, is_flag, not_negative
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.ops.rope_kv_write import normed, rotate
from ingot.plugins.work import OpUse, plain_work
from ingot.step_work import Work


def reference(call: Call) -> tuple[Array, ...]:
    """cache[slot of each token] = [norm(latent[:rank]) | rotate(latent[rank:])]; returns q, the last columns of each
    head rotated, as many as a latent has behind its rank, and all times
    1 + growth * log(1 + floor(position / growth_every))."""
    q, latent, cos_sin, attrs = call.required(0), call.required(1), call.optional(2), call.attrs
    heads, width, rank = int(attrs["heads"]), int(attrs["head_dim"]), int(attrs["rank"])
    tokens, rotary_dim = len(q), width - rank
    queries = q.reshape(tokens, heads, -1).copy()
    key = latent[:, None, rank:]
    if cos_sin is not None:
        cos, sin = np.split(cos_sin, 2, axis=-1)
        pairs = bool(attrs["interleaved"])
        key = rotate(key, cos, sin, interleaved=pairs)
        queries[:, :, -rotary_dim:] = rotate(queries[:, :, -rotary_dim:], cos, sin, interleaved=pairs)
    value = normed(latent[:, :rank], call.required(3), float(attrs["norm_eps"]))[:, None]
    keys = np.concatenate([value, key], axis=2)
    positions, sequences, (kv, tables) = call.integers(4), call.integers(5), call.cache(6)
    size = kv.group.tokens_per_block
    kv.write(int(attrs["layer"]), tables[sequences, positions // size], positions % size, keys, value)
    counts = 1 + positions.astype(np.int64) // int(attrs["growth_every"])
    queries *= (1 + float(attrs["growth"]) * np.log(counts)).astype(np.float32)[:, None, None]
    return (queries.reshape(tokens, -1),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """A latent is as wide as the cache's rows; a query has more columns than are rotated."""
    heads, width, rank = (int(attrs[name]) for name in ("heads", "head_dim", "rank"))
    (cols,), rotary = shapes[0] or (0,), shapes[2]
    if rank >= width:
        return f"a rank of {rank} leaves nothing of {width} numbers to rotate"
    if cols % heads or cols // heads < width - rank:
        return f"{cols} columns of queries are not {heads} heads of at least {width - rank}"
    if rotary is not None and rotary[0] not in range(2, width - rank + 1, 2):
        return f"{rotary[0]} rotary dimensions do not fit into {width - rank}"
    return unequal("latent", shapes[1], width) or unequal("norm", shapes[3], rank)


def work(use: OpUse) -> Work:
    """A row of the cache is written for each token."""
    return plain_work(use) + Work(nbytes=use.load.tokens * use.kv_bytes_per_token, operations=0)


OP = Op(
    name="latent_kv_write",
    # [tokens, heads * (K + rotated)], [tokens, rank + rotated], [tokens, rotary_dim], [rank]
    inputs=("q", "latent", "cos_sin?", "norm", "positions", "token_sequences", "block_tables"),
    outputs=("rotated",),  # as q; may be its buffer
    attrs={
        **{"layer": int, "heads": int, "kv_heads": 1, "head_dim": int, "rank": int},
        **{"interleaved": 0, "norm_eps": 0.0, "growth": 0.0, "growth_every": 1},
    },
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    attr_rules={
        **{**LATENT_RULES, "interleaved": is_flag, "norm_eps": not_negative},
        **{"growth": not_negative, "growth_every": between(1, LARGEST)},
    },
    work=work,
    uses_kv=True,
    writes_kv=True,
    latent=True,
    vectors=(3,),
    batch_inputs={4: 0, 5: 0, 6: 0},
    of_tokens=True,
    in_place=((0, 0),),
)
