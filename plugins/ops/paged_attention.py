"""Causal attention of each token over its sequence's blocks of the KV cache (MHA, GQA, MQA)."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, from_float32, to_float32
from ingot.plan import Attr
from ingot.plugins.attributes import HEAD_RULES, LARGEST, between, not_negative
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.work import OpUse
from ingot.step_work import Work


def reference(call: Call) -> tuple[Array, ...]:
    """y[t, h] = softmax(capped(scale * q[t, h] . K[first : position + 1])) @ V[first : position + 1]

    of KV head h // (heads / kv_heads); first = position + 1 - window, or 0 without a window; capped(s) =
    softcap * tanh(s / softcap), or s without a cap. With a growth the scale of a token's scores is multiplied by 1 +
    growth * log(1 + floor(position / growth_every)), as Ministral 3 has it.

    A head's slope adds slope * (token - position) to each capped score (ALiBi, arXiv:2108.12409); with bf16_bias
    scale * bf16(slope * bf16(token)) instead, as Falcon does. A head's sink takes part in its softmax like the score of
    a token whose value is zero; neither scale nor cap nor window apply to it.

    In an int8 cache K and V are codes times scales. Kernels multiply with the codes, in float32, or in bf16 on GPUs and
    on CPUs with AVX-512 BF16: the sum over the dims of (scale * q) . codes is multiplied by the token's key scale, then
    capped; a weight enters the sum of weights, then is multiplied by the token's value scale, then with the codes.
    """
    q, sinks, slopes, attrs = call.required(0), call.optional(1), call.optional(2), call.attrs
    starts, past_lengths = call.integers(3), call.integers(4)
    heads, kv_heads, dim = int(attrs["heads"]), int(attrs["kv_heads"]), int(attrs["head_dim"])
    window, cap = int(attrs["window"]), float(attrs["softcap"])
    out, (kv, tables) = np.empty_like(q), call.cache(5)
    size = kv.group.tokens_per_block
    for s, past in enumerate(past_lengths):
        begin, end = starts[s], starts[s + 1]
        total = int(past + end - begin)
        unseen = max(0, int(past) + 1 - window) // size if window else 0  # blocks that may be another sequence's by now
        keys, values = kv.read(int(attrs["layer"]), tables[s, unseen : -(-total // size)])
        group = heads // kv_heads
        keys, values = np.repeat(keys, group, axis=1).astype(np.float64), np.repeat(values, group, axis=1)
        for t in range(begin, end):
            visible = int(past + t - begin + 1)
            first = max(0, visible - window) if window else 0
            seen = np.s_[first - unseen * size : visible - unseen * size]
            scores = np.einsum("hd,nhd->hn", q[t].reshape(heads, dim), keys[seen]) * _scale(visible - 1, attrs)
            if cap:
                scores = cap * np.tanh(scores / cap)
            if slopes is not None:
                scores += _bias(slopes, np.arange(first, visible), attrs)
            if sinks is not None:
                scores = np.concatenate([scores, sinks[:, None]], axis=1)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            weights = weights[:, : visible - first]
            out[t] = np.einsum("hn,nhd->hd", weights, values[seen]).reshape(-1)
    return (out,)


def _scale(position: int, attrs: Mapping[str, Attr]) -> float:
    """Factor of the scores of a token"""
    count = 1 + position // int(attrs["growth_every"])
    return float(attrs["scale"]) * (1 + float(attrs["growth"]) * math.log(count))


def _bias(slopes: Array, tokens: npt.NDArray[np.int64], attrs: Mapping[str, Attr]) -> npt.NDArray[np.float64]:
    """[heads, tokens]: what is added to the scores of the last of these tokens"""
    if not attrs["bf16_bias"]:
        return np.outer(slopes, tokens - tokens[-1])
    products = np.outer(slopes, _rounded(tokens.astype(np.float32)))
    return _rounded(products).astype(np.float64) * float(attrs["scale"])


def _rounded(numbers: Array) -> Array:
    return to_float32(from_float32(numbers, DType.BF16), DType.BF16)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """KV heads share the heads evenly, and queries have a column for each dimension of each head."""
    heads, kv_heads, dim = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    if heads % kv_heads:
        return f"{heads} heads are not a multiple of {kv_heads} KV heads"
    vectors = (unequal(name, shape, heads) for name, shape in zip(("sinks", "slopes"), shapes[1:3], strict=True))
    return unequal("q", shapes[0], heads * dim) or next(filter(None, vectors), None)


def work(use: OpUse) -> Work:
    """Keys and values that any token of a sequence sees are read once."""
    tokens, pairs = 0, 0
    for past, count in use.load.sequences:
        window = int(use.attrs["window"]) or past + count
        tokens += min(past + count, window - 1 + count)
        full = max(0, min(count, window - past))  # tokens that see everything before them
        pairs += full * past + full * (full + 1) // 2 + (count - full) * window
    nbytes = use.activation_bytes + tokens * use.kv_bytes_per_token
    return Work(nbytes=nbytes, operations=4 * pairs * use.out_cols)


OP = Op(
    name="paged_attention",
    # q [tokens, heads * head_dim], sinks and slopes [heads]
    inputs=("q", "sinks?", "slopes?", "query_starts", "past_lengths", "block_tables"),
    outputs=("y",),  # [tokens, heads * head_dim]
    attrs={
        "layer": int,
        "heads": int,
        "kv_heads": int,
        "head_dim": int,
        "scale": float,
        "window": 0,
        "softcap": 0.0,
        "bf16_bias": 0,
        "growth": 0.0,
        "growth_every": 1,
    },
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    # window: tokens that a token sees, itself included, 0 for all; softcap: 0 for none
    attr_rules={
        **HEAD_RULES,
        "window": between(0, LARGEST + 1),
        "softcap": not_negative,
        "bf16_bias": between(0, 2),
        "growth": not_negative,
        "growth_every": between(1, LARGEST),
    },
    work=work,
    uses_kv=True,
    vectors=(1, 2),
    batch_inputs={3: 0, 4: 0, 5: 0},
    of_tokens=True,
)
