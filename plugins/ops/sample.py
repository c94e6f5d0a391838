"""Draws one token from each wanted row of logits: biases, penalties, then greedy, or temperature, min-p, top-k, top-p.

Randomness is Philox4x32-10 (Salmon et al., 2011), keyed by the request's seed and counted by its generated tokens,
so that a draw depends on nothing else in the batch.
"""

import math

import numpy as np
import numpy.typing as npt

from ingot.plugins.op import Array, Call, Op
from ingot.step_io import DrawRules, SampleRows, StepResult

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def uniform(seed: int, counter: int) -> float:
    """Float in [0, 1) with 24 random bits: the first word of Philox4x32-10(key=seed, counter=(counter, 0))."""
    key = [seed & 0xFFFFFFFF, seed >> 32]
    state = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    for _ in range(10):
        wide0, wide1 = _MULTIPLIERS[0] * state[0], _MULTIPLIERS[1] * state[2]
        state = [
            (wide1 >> 32) ^ state[1] ^ key[0],
            wide1 & 0xFFFFFFFF,
            (wide0 >> 32) ^ state[3] ^ key[1],
            wide0 & 0xFFFFFFFF,
        ]
        key = [(key[0] + _WEYL[0]) & 0xFFFFFFFF, (key[1] + _WEYL[1]) & 0xFFFFFFFF]
    return (state[0] >> 8) * 2.0**-24


def edited(logits: Array, rules: DrawRules, q: int) -> Array:
    """The logits that draw q chooses from, float32 [vocab]."""
    line = logits.copy()
    biased = slice(*rules.bias_starts[q : q + 2])
    np.add.at(line, rules.bias_ids[biased], rules.bias[biased])
    history = rules.history[slice(*rules.history_starts[q : q + 2])]
    seen = np.unique(history)
    penalty = rules.repetition_penalty[q]
    line[seen] = np.where(line[seen] > 0, line[seen] / penalty, line[seen] * penalty)
    generated, counts = np.unique(history[rules.num_prompt[q] :], return_counts=True)
    line[generated] -= rules.frequency_penalty[q] * counts.astype(np.float32)
    line[generated] -= rules.presence_penalty[q]
    return line


def draw(
    logits: Array, temperature: float, top_k: int, top_p: float, seed: int, counter: int, min_p: float = 0.0
) -> int:
    """One token id. Ties: the lower id comes first, in argmax as in top-k and top-p."""
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(len(scaled)), -scaled))  # most likely first
    if min_p > 0:
        order = order[scaled[order] >= scaled[order[0]] + math.log(min_p)]
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    if top_p < 1:
        reached = np.cumsum(weights) >= top_p * weights.sum()
        order = order[: int(np.argmax(reached)) + 1]
        weights = weights[: len(order)]
    by_id = np.argsort(order)  # the walk goes in id order, so that no sort is needed when nothing is cut
    running = np.cumsum(weights[by_id])
    chosen = int(np.searchsorted(running, uniform(seed, counter) * running[-1], side="right"))
    return int(order[by_id[min(chosen, len(order) - 1)]])


def sample(logits: Array, rows: SampleRows) -> StepResult:
    """Every draw of `rows` from logits float32 [R, vocab]."""
    ids = np.empty(len(rows.row), dtype=np.int32)
    log_probs = np.empty(len(rows.row), dtype=np.float32)
    ranks, top_ids, top_log_probs = np.empty_like(ids), [], []
    for q, row in enumerate(rows.row):
        every = log_softmax(logits[row])
        ids[q] = token = _token(logits[row], rows, q)
        log_probs[q] = every[token] if token >= 0 else -np.inf
        if rows.probs is not None:
            order = np.lexsort((np.arange(len(every)), -logits[row]))
            top = order[: np.diff(rows.probs.top_starts)[q]]
            ranks[q] = 1 + np.flatnonzero(order == token)[0] if token >= 0 else 0
            top_ids.append(top)
            top_log_probs.append(every[top])
    if rows.probs is None:
        return StepResult(ids=ids, log_probs=log_probs)
    return StepResult(
        ids=ids,
        log_probs=log_probs,
        ranks=ranks,
        top_ids=np.concatenate([ids[:0], *top_ids]).astype(np.int32),
        top_log_probs=np.concatenate([log_probs[:0], *top_log_probs]).astype(np.float32),
    )


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities, float64 [vocab]; NaN where the row is no distribution."""
    wide = logits.astype(np.float64)
    top = wide.max()
    if not np.isfinite(top):
        return np.full(wide.shape, np.nan)
    every: npt.NDArray[np.float64] = wide - top - np.log(np.exp(wide - top).sum())
    return every


def _token(logits: Array, rows: SampleRows, q: int) -> int:
    """The given token, or the drawn one; -1 if the rules leave none; argmax where the logits are no distribution."""
    if rows.probs is not None and rows.probs.given[q] >= 0:
        return int(rows.probs.given[q])
    if not np.isfinite(logits.max()):
        return int(np.argmax(logits))
    min_p = 0.0
    if rows.rules is not None:
        logits, min_p = edited(logits, rows.rules, q), float(rows.rules.min_p[q])
        if not np.isfinite(logits.max()):
            return -1
    return draw(
        logits,
        float(rows.temperature[q]),
        int(rows.top_k[q]),
        float(rows.top_p[q]),
        int(rows.seed[q]),
        int(rows.counter[q]),
        min_p,
    )


def reference(call: Call) -> tuple[Array, ...]:
    """The ids as one float32 column: [Q, 1] (targets return them through StepResult)."""
    ids = sample(call.required(0), call.batch.sample).ids
    return (ids.astype(np.float32)[:, None],)


OP = Op(
    name="sample",
    inputs=("logits",),  # [logit rows, vocab]
    outputs=(),
    attrs={},
    out_cols=lambda cols, attrs: (),
    reference=reference,
    is_step=False,
)
