"""Norms queries and keys where the model does, rotates them, then writes keys and values into the paged KV cache."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import HEAD_RULES, is_flag, not_negative
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.work import OpUse, plain_work
from ingot.step_work import Work

_FLAGS = ("interleaved", "value_norm", "keys_as_values")


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """x [tokens, heads, head_dim]; the first rotary_dim dims rotate in pairs (i, i + half) or (2i, 2i + 1)."""
    half = cos.shape[-1]
    out = x.copy()
    first = x[..., 0 : 2 * half : 2] if interleaved else x[..., :half]
    second = x[..., 1 : 2 * half : 2] if interleaved else x[..., half : 2 * half]
    rotated_first = first * cos[:, None] - second * sin[:, None]
    rotated_second = second * cos[:, None] + first * sin[:, None]
    if interleaved:
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = rotated_first, rotated_second
    else:
        out[..., :half], out[..., half : 2 * half] = rotated_first, rotated_second
    return out


def normed(x: Array, weight: Array | None, eps: float) -> Array:
    """x [tokens, width]: RMS norm over each run of as many dims as the weight has."""
    if weight is None:
        return x
    runs = x.reshape(len(x), -1, len(weight)).astype(np.float64)
    normal = runs / np.sqrt((runs**2).mean(axis=-1, keepdims=True) + eps) * weight
    result: Array = normal.astype(np.float32).reshape(x.shape)
    return result


def reference(call: Call) -> tuple[Array, ...]:
    """q, k, v = split(qkv); q, k = rotate(norm(q), norm(k)); cache[slot of each token] = k, v; returns q

    keys_as_values: qkv holds q and k alone, and v is k before its norm. value_norm: v, too, is normed, head by head and
    without a weight.

    An int8 cache takes k and v as `round_to_int8` rounds them, one scale per token and head: a row that is not finite
    becomes NaN, whole.
    """
    qkv, cos_sin, attrs = call.required(0), call.optional(1), call.attrs
    heads, kv_heads, dim = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    tokens = len(qkv)
    eps = float(attrs["norm_eps"])
    q = normed(qkv[:, : heads * dim], call.optional(2), eps).reshape(tokens, heads, dim)
    keys = qkv[:, heads * dim : (heads + kv_heads) * dim]
    k = normed(keys, call.optional(3), eps).reshape(tokens, kv_heads, dim)
    v = keys if attrs["keys_as_values"] else qkv[:, (heads + kv_heads) * dim :]
    if attrs["value_norm"]:
        v = normed(v, np.ones(dim, np.float32), eps)
    v = v.reshape(tokens, kv_heads, dim)
    if cos_sin is not None:
        cos, sin = np.split(cos_sin, 2, axis=-1)
        interleaved = bool(attrs["interleaved"])
        q, k = rotate(q, cos, sin, interleaved=interleaved), rotate(k, cos, sin, interleaved=interleaved)
    positions, sequences, (kv, tables) = call.integers(4), call.integers(5), call.cache(6)
    block_size = kv.group.tokens_per_block
    kv.write(int(attrs["layer"]), tables[sequences, positions // block_size], positions % block_size, k, v)
    return (np.ascontiguousarray(q.reshape(tokens, heads * dim)),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """The columns must fit the heads; a norm is as long as one head or as all heads."""
    heads, kv_heads, dim = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    if shapes[1] is not None and shapes[1][0] not in range(2, dim + 1, 2):
        return f"{shapes[1][0]} rotary dimensions do not fit into a head of {dim}"
    for name, norm, count in (("q_norm", shapes[2], heads), ("k_norm", shapes[3], kv_heads)):
        if norm not in (None, (dim,), (count * dim,)):
            return f"{name} has shape {norm} instead of ({dim},), one head, or ({count * dim},), all heads"
    return unequal("qkv", shapes[0], (heads + (1 if attrs["keys_as_values"] else 2) * kv_heads) * dim)


def work(use: OpUse) -> Work:
    """Keys and values are written. Queries that attention rotates itself are neither read nor written here."""
    plain = plain_work(use) + Work(nbytes=use.load.tokens * use.kv_bytes_per_token, operations=0)
    if not use.inside:
        return plain
    return Work(
        nbytes=plain.nbytes - 2 * 4 * use.rows * use.out_cols,
        operations=plain.operations * int(use.attrs["kv_heads"]) // int(use.attrs["heads"]),
    )


OP = Op(
    name="rope_kv_write",
    # [tokens, (heads + 2 kv_heads) * head_dim], without values where keys are, [tokens, rotary_dim],
    # [head_dim] or [width of all (key) heads]
    inputs=("qkv", "cos_sin?", "q_norm?", "k_norm?", "positions", "token_sequences", "block_tables"),
    outputs=("q",),  # [tokens, heads * head_dim]
    attrs={
        **{"layer": int, "heads": int, "kv_heads": int, "head_dim": int, "interleaved": 0, "norm_eps": 0.0},
        **{"value_norm": 0, "keys_as_values": 0},
    },
    out_cols=lambda cols, attrs: (int(attrs["heads"]) * int(attrs["head_dim"]),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={**HEAD_RULES, "norm_eps": not_negative, **dict.fromkeys(_FLAGS, is_flag)},
    work=work,
    uses_kv=True,
    writes_kv=True,
    vectors=(2, 3),
    batch_inputs={4: 0, 5: 0, 6: 0},
    of_tokens=True,
    keeps_inputs=True,  # attention may rotate queries itself
)
