"""Draws one token from each wanted row of logits: greedy, or temperature, then top-k, then top-p.

Randomness is Philox4x32-10 (Salmon et al., 2011), keyed by the request's seed and counted by its generated tokens,
so that a draw depends on nothing else in the batch.
"""

import numpy as np

from ingot.plugins.op import Array, Call, Op
from ingot.step_io import SampleRows

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


def draw(logits: Array, temperature: float, top_k: int, top_p: float, seed: int, counter: int) -> int:
    """One token id. Ties: the lower id comes first, in argmax as in top-k and top-p."""
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(len(scaled)), -scaled))  # most likely first
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


def sample(logits: Array, rows: SampleRows) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 [Q] and log_probs float32 [Q] of the drawn tokens under softmax(raw logits)."""
    ids = np.empty(len(rows.row), dtype=np.int32)
    log_probs = np.empty(len(rows.row), dtype=np.float32)
    for q, row in enumerate(rows.row):
        line = logits[row]
        ids[q] = draw(line, float(rows.temperature[q]), int(rows.top_k[q]), float(rows.top_p[q]),
                      int(rows.seed[q]), int(rows.counter[q]))  # fmt: skip
        wide = line.astype(np.float64)
        top = wide.max()
        log_probs[q] = wide[ids[q]] - top - np.log(np.exp(wide - top).sum())
    return ids, log_probs


def reference(call: Call) -> tuple[Array, ...]:
    """The ids as one float32 column: [Q, 1] (targets return them through StepResult)."""
    ids, _ = sample(call.required(0), call.batch.sample)
    return (ids.astype(np.float32)[:, None],)


OP = Op(
    name="sample",
    inputs=("logits",),  # [logit rows, vocab]
    outputs=(),
    attrs={},
    out_cols=lambda cols, attrs: (),
    reference=reference,
)
