"""Linear attention with a recurrent state: the gated delta rule, also with a decay for each dim of a key (Kimi Delta
Attention), and the gated rule of Mamba 2.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024); Dao, Gu, "Transformers are SSMs" (2024); Moonshot AI,
"Kimi Linear" (2025).
"""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import LARGEST, between, is_flag, not_negative
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.work import OpUse
from ingot.step_work import Work

LARGEST_STEP = 3.0e38  # of dt_max: no bound


def _softplus(x: Array) -> Array:
    """log(1 + e^x) in float64."""
    wide = x.astype(np.float64)
    return np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide)))


def reference(call: Call) -> tuple[Array, ...]:
    """Each head goes on from its state S [key_dim, value_dim], token by token:

        step = clamp(softplus(dt), dt_min, dt_max)      S = exp(-exp(a_log) * step) * S
        with beta:     S = S + outer(k, sigmoid(beta) * (v - k @ S))
        without beta:  S = S + outer(k, step * v)
        y = q @ S (+ skip * v)

    by_dim: there is a step for each dim of a key, which multiplies the row of S that belongs to it.
    Key head h // (heads / key_heads) serves head h. With l2_eps above 0, q and k are first divided by the root of their
    sum of squares plus l2_eps. q is multiplied by `scale`. Kernels compute in float32, dims of the key ascending.
    """
    x, dt, beta, attrs = call.required(0), call.required(1), call.optional(2), call.attrs
    a_log, skip = call.required(3).astype(np.float64), call.optional(4)
    heads, key_heads = int(attrs["heads"]), int(attrs["key_heads"])
    key_dim, value_dim = int(attrs["key_dim"]), int(attrs["value_dim"])
    keys, values = key_heads * key_dim, heads * value_dim
    if attrs["values_first"]:
        v, k, q = np.split(x.astype(np.float64), [values, values + keys], axis=1)
    else:
        q, k, v = np.split(x.astype(np.float64), [keys, 2 * keys], axis=1)
    q, k = (each.reshape(-1, key_heads, key_dim) for each in (q, k))
    if eps := float(attrs["l2_eps"]):
        q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + eps) for each in (q, k))
    q, k = (np.repeat(each, heads // key_heads, axis=1) for each in (q * float(attrs["scale"]), k))
    v = v.reshape(-1, heads, value_dim)
    steps = np.clip(_softplus(dt), float(attrs["dt_min"]), float(attrs["dt_max"]))
    dims = key_dim if attrs["by_dim"] else 1
    decay = np.exp(-np.exp(a_log)[:, None] * steps.reshape(-1, heads, dims))
    strength = None if beta is None else 1 / (1 + np.exp(-beta.astype(np.float64)))
    out = np.empty((len(x), heads, value_dim))
    for run in call.state_runs(5, 6, 7):
        state = run.before.reshape(heads, key_dim, value_dim).astype(np.float64)
        for t in range(run.begin, run.end):
            state = state * decay[t][:, :, None]
            if strength is None:
                change = steps[t][:, None] * v[t]
            else:
                change = strength[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state = (state + k[t][:, :, None] * change[:, None]).astype(np.float32).astype(np.float64)
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
        run.after[...] = state.astype(np.float32).reshape(-1)
    if skip is not None:
        out += skip[:, None] * v
    return (out.reshape(len(x), -1).astype(np.float32),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Key heads serve as many heads each; a step, a strength, a decay and a skip for each head."""
    heads, key_heads = int(attrs["heads"]), int(attrs["key_heads"])
    if heads % key_heads:
        return f"{heads} heads are not a multiple of {key_heads} key heads"
    width = 2 * key_heads * int(attrs["key_dim"]) + heads * int(attrs["value_dim"])
    problem = unequal("x", shapes[0], width)
    if attrs["by_dim"] and shapes[2] is None:
        return "input beta is missing, which decays by dimension (by_dim) need"
    problem = problem or unequal("dt", shapes[1], heads * (int(attrs["key_dim"]) if attrs["by_dim"] else 1))
    for name, shape in zip(("beta", "a_log", "skip"), shapes[2:5], strict=True):
        problem = problem or unequal(name, shape, heads)
    return problem


def work(use: OpUse) -> Work:
    """Each sequence's state is read and written once; a token passes over it four times."""
    state = int(use.attrs["heads"]) * int(use.attrs["key_dim"]) * int(use.attrs["value_dim"])
    nbytes = use.activation_bytes + use.weight_bytes + 8 * state * len(use.load.sequences)
    return Work(nbytes=nbytes, operations=7 * use.rows * state)


OP = Op(
    name="linear_attention",
    # x [tokens, q | k | v of all heads, or v | k | q], dt and beta [tokens, heads], a_log and skip [heads];
    # by_dim: dt [tokens, heads * key_dim]
    inputs=("x", "dt", "beta?", "a_log", "skip?", "query_starts", "past_lengths", "block_tables"),
    outputs=("y",),  # [tokens, heads * value_dim]
    attrs={
        "layer": int,
        "heads": int,
        "key_heads": int,
        "key_dim": int,
        "value_dim": int,
        "values_first": 0,
        "scale": 1.0,
        "l2_eps": 0.0,
        "dt_min": 0.0,
        "dt_max": LARGEST_STEP,
        "by_dim": 0,
    },
    out_cols=lambda cols, attrs: (int(attrs["heads"]) * int(attrs["value_dim"]),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={
        "layer": between(0, LARGEST),
        "heads": between(1, 4096),
        "key_heads": between(1, 4096),
        "key_dim": between(1, 1024),
        "value_dim": between(1, 1024),
        "values_first": is_flag,
        "l2_eps": not_negative,
        "dt_min": not_negative,
        "dt_max": not_negative,
        "by_dim": is_flag,
    },
    work=work,
    vectors=(3, 4),
    decisive=(1, 2),
    batch_inputs={5: 0, 6: 0, 7: 0},
    of_tokens=True,
    state=lambda attrs: int(attrs["heads"]) * int(attrs["key_dim"]) * int(attrs["value_dim"]),
)
