"""Draws one token from each wanted row of logits: biases, penalties, then greedy, or temperature, min-p, top-k, top-p.

Randomness is Philox4x32-10 (Salmon et al., 2011), keyed by the sequence's seed and counted by its generated tokens,
so that a draw depends on nothing else in the batch. `plugins/sequences.py` says which draws a sequence makes.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.plugins.op import Array, Call, Op
from ingot.step_io import Float32, Int32, SequenceRules, UInt32

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One token from a row of logits, or the probability of one that is known.

    row             index into the rows of logits
    rules           those of its sequence
    counter         tokens that the sequence has generated so far
    allowed         a bit per token, the lowest first: those that may be drawn; None: all
    bias_ids, bias  what is added to the logits of these tokens; -inf bans one
    history         all tokens of a sequence with penalties, the first num_prompt of which it did not generate
    known           a token whose probability is wanted: then nothing is drawn; else -1
    """

    row: int
    rules: SequenceRules
    counter: int = 0
    allowed: UInt32 | None = None
    bias_ids: Sequence[int] = ()
    bias: Sequence[float] = ()
    history: Sequence[int] = ()
    num_prompt: int = 0
    known: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The results of N draws: the arrays of one step in StepResult."""

    ids: Int32
    log_probs: Float32
    token_ranks: Int32 | None = None
    top_ids: Int32 | None = None
    top_log_probs: Float32 | None = None


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


def edited(logits: Array, draw: Draw) -> Array:
    """The logits that a draw chooses from, float32 [vocab]."""
    line, rules = logits.copy(), draw.rules
    if draw.allowed is not None:
        bits = np.unpackbits(draw.allowed.view(np.uint8), bitorder="little")[: len(line)]
        line[: len(bits)][bits == 0] = -np.inf
        line[len(bits) :] = -np.inf
    np.add.at(line, np.array(draw.bias_ids, np.int32), np.array(draw.bias, np.float32))
    history = np.array(draw.history, np.int32)
    seen, penalty = np.unique(history), np.float32(rules.repetition_penalty)
    line[seen] = np.where(line[seen] > 0, line[seen] / penalty, line[seen] * penalty)
    generated, counts = np.unique(history[draw.num_prompt :], return_counts=True)
    line[generated] -= np.float32(rules.frequency_penalty) * counts.astype(np.float32)
    line[generated] -= np.float32(rules.presence_penalty)
    return line


def draw_token(
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


def sample(logits: Array, draws: Sequence[Draw], processed: Array | None = None) -> Drawn:
    """Every draw from logits float32 [R, vocab]. processed: tokens of draw q are drawn from its row q instead."""
    ids = np.empty(len(draws), dtype=np.int32)
    log_probs = np.empty(len(draws), dtype=np.float32)
    token_ranks, top_ids, top_log_probs = np.zeros_like(ids), [], []
    for q, draw in enumerate(draws):
        raw = logits[draw.row]
        every = log_softmax(raw)
        ids[q] = token = _token(raw if processed is None else processed[q], draw)
        log_probs[q] = every[token] if token >= 0 else -np.inf
        if draw.rules.top is not None:
            order = ranking(raw)
            top = order[: draw.rules.top]
            token_ranks[q] = 1 + np.flatnonzero(order == token)[0] if token >= 0 else 0
            top_ids.append(top)
            top_log_probs.append(every[top])
    if not top_ids:
        return Drawn(ids=ids, log_probs=log_probs)
    return Drawn(
        ids=ids,
        log_probs=log_probs,
        token_ranks=token_ranks,
        top_ids=np.concatenate(top_ids).astype(np.int32),
        top_log_probs=np.concatenate(top_log_probs).astype(np.float32),
    )


def ranking(logits: Array) -> npt.NDArray[np.int64]:
    """The ids of all tokens, the most likely first."""
    return np.lexsort((np.arange(len(logits)), -logits))


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities, float64 [vocab]; NaN where the row is not a distribution."""
    wide = logits.astype(np.float64)
    top = wide.max()
    if not np.isfinite(top):
        return np.full(wide.shape, np.nan)
    every: npt.NDArray[np.float64] = wide - top - np.log(np.exp(wide - top).sum())
    return every


def _token(logits: Array, draw: Draw) -> int:
    """The known token, or the drawn one; -1 if the rules leave none; argmax where the logits are not a distribution."""
    if draw.known >= 0:
        return draw.known
    if not np.isfinite(logits.max()):
        return int(np.argmax(logits))
    rules = draw.rules
    if draw.allowed is not None or len(draw.bias_ids) or len(draw.history):
        logits = edited(logits, draw)
        if not np.isfinite(logits.max()):
            return -1
    temperature, top_p, min_p = (float(np.float32(each)) for each in (rules.temperature, rules.top_p, rules.min_p))
    return draw_token(logits, temperature, rules.top_k, top_p, rules.seed, draw.counter, min_p)


def reference(call: Call) -> tuple[Array, ...]:
    """The most likely id of every row, as one float32 column (targets draw through StepResult)."""
    logits = call.required(0)
    greedy = [Draw(row=row, rules=SequenceRules()) for row in range(len(logits))]
    return (sample(logits, greedy).ids.astype(np.float32)[:, None],)


OP = Op(
    name="sample",
    inputs=("logits",),  # [logit rows, vocab]
    outputs=(),
    attrs={},
    out_cols=lambda cols, attrs: (),
    reference=reference,
    is_step=False,
)
