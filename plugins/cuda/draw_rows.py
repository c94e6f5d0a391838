"""Draws as the kernel `draw_tokens` reads them: a row of integers each, and lists of biases and masks.

plain sequences    rows kept by slot; a step copies them, and sets the row of logits and the counter
all other draws    rows and lists made for each step, in rounds that memory has room for
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ingot.plan import Plan
from ingot.plugins.ops.sample import Draw
from ingot.step_io import Int32, SequenceRules

_INT = 4
_LINES = 32  # draws of one launch whose rules change logits: each needs a copy of its row
MOST_LIKELY = 1024  # tokens that a draw lists on the device; longer lists are sorted on the host
RESULT = 3  # integers of a draw's result: token, log probability, rank

ROW = np.dtype(  # struct Draw of draw.cu
    [
        ("row", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("seed", np.uint64),
        ("counter", np.uint64),
        ("log_min_p", np.float64),
        *[(name, np.float32) for name in ("repetition", "frequency", "presence")],
        *[(name, np.int32) for name in ("biases", "num_biases", "mask", "mask_words")],
        *[(name, np.int32) for name in ("slot", "length", "num_prompt")],
        *[(name, np.int32) for name in ("known", "top", "num_top", "line")],
    ]
)
WIDTH = ROW.itemsize // _INT
_NONE: Int32 = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawLayout:
    """Integers of what draws need on the device.

    draws    of one round: what is sent and fetched at a time
    lists    of the biases and masks of a round: at least those of any draw
    tops     of the most likely tokens of a round: twice as many as tokens
    history  of a sequence
    lines    of scratch, each [vocab] floats and [vocab] counts
    """

    draws: int
    lists: int
    tops: int
    slots: int
    history: int
    lines: int
    vocab: int

    @classmethod
    def of(cls, plan: Plan) -> "DrawLayout":
        """Every step within the plan's limits needs few rounds."""
        limits, vocab = plan.limits, plan.vocab_size
        mask = _mask_words(vocab)
        return cls(
            draws=limits.max_logit_rows,
            lists=max(4 * vocab + mask, _LINES * mask),  # a bias and a ban for each token
            tops=2 * max(MOST_LIKELY, 32 * limits.max_logit_rows),
            slots=limits.max_batch_size,
            history=limits.max_seq_len + 1,
            lines=min(_LINES, limits.max_batch_size),
            vocab=vocab,
        )

    @property
    def sent(self) -> int:
        return WIDTH * self.draws + self.lists

    @property
    def results(self) -> int:
        return RESULT * self.draws + self.tops

    @property
    def nbytes(self) -> int:
        """On the device."""
        return _INT * (self.sent + self.results + self.slots * (self.history + 1) + 2 * self.lines * self.vocab)


@dataclasses.dataclass(kw_only=True, slots=True)
class Round:
    """Draws that are computed together. plain: those of plain sequences, which come first, from one place to another
    in their order. launches: how many each launch computes; tops: most likely tokens."""

    plain: tuple[int, int] = (0, 0)
    rows: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    lists: list[Int32] = dataclasses.field(default_factory=list)
    num_lists: int = 0
    tops: int = 0
    lines: int = 0
    launches: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_plain(self) -> int:
        return self.plain[1] - self.plain[0]

    @property
    def count(self) -> int:
        """Draws in it."""
        return self.num_plain + len(self.rows)


class PlainRows:
    """The rows of plain sequences, by slot."""

    def __init__(self, layout: DrawLayout) -> None:
        self._vocab = layout.vocab
        self._rows: Int32 = np.zeros((layout.slots, WIDTH), np.int32)

    def start(self, slot: int, rules: SequenceRules, num_prompt: int) -> None:
        """Keep the row of a sequence."""
        draw = Draw(row=0, rules=rules, num_prompt=num_prompt)
        self._rows[slot] = np.array([_row(draw, Round(), 0, 0, slot, -1, False, self._vocab)], ROW).view(np.int32)

    def put(self, to: Int32, slots: Int32, rows: Int32, counters: Int32) -> None:
        """Write those of a step. rows: of logits. to: int32 [draws x WIDTH]."""
        self._rows.take(slots, axis=0, out=to.reshape(len(slots), WIDTH), mode="clip")
        written = to.view(ROW)
        written["row"], written["counter"] = rows, counters


def rounds_of(num_plain: int, draws: Sequence[Draw], slots: Sequence[int], layout: DrawLayout) -> Iterator[Round]:
    """As few as there is room for. slots: of the other draws, -1 for those of no sequence."""
    begin = 0
    while num_plain - begin > layout.draws:
        yield Round(plain=(begin, begin + layout.draws), launches=[layout.draws])
        begin += layout.draws
    current = Round(plain=(begin, num_plain), launches=[num_plain - begin] if num_plain > begin else [])
    for draw, slot in zip(draws, slots, strict=True):
        mask, biases = _mask(draw, layout.vocab), _biases(draw)
        count = len(mask) + len(biases)
        num_top = -1 if draw.rules.top is None else draw.rules.top
        listed = num_top if num_top <= MOST_LIKELY else 0  # else its rank alone
        full = current.count == layout.draws or current.num_lists + count > layout.lists
        if full or 2 * (current.tops + listed) > layout.tops:
            yield current
            current = Round()
        penalised = slot >= 0 and draw.rules.penalises
        changes = draw.known < 0 and (draw.allowed is not None or bool(count) or penalised)
        if not current.launches or (changes and current.lines == layout.lines):
            current.launches.append(0)
            current.lines = 0
        current.launches[-1] += 1
        current.rows.append(_row(draw, current, len(biases), len(mask), slot, listed, changes, layout.vocab))
        current.lines += changes
        current.lists += [biases, mask]
        current.num_lists += count
        current.tops += max(listed, 0)
    if current.count:
        yield current


def _row(
    draw: Draw, before: Round, biases: int, mask: int, slot: int, listed: int, changes: bool, vocab: int
) -> tuple[float, ...]:
    """In the order of ROW; but `top` still counts tokens of the round, from 0."""
    rules = draw.rules
    min_p = float(np.float32(rules.min_p))
    return (
        draw.row,
        rules.temperature,
        min(rules.top_k, vocab),
        rules.top_p,
        rules.seed,
        draw.counter,
        math.log(min_p) if min_p > 0 else -math.inf,
        rules.repetition_penalty,
        rules.frequency_penalty,
        rules.presence_penalty,
        before.num_lists,
        biases // 2,
        before.num_lists + biases,
        -1 if draw.allowed is None else mask,
        slot,
        draw.num_prompt + draw.counter if rules.penalises else 0,
        draw.num_prompt,
        draw.known,
        2 * before.tops,
        listed,
        before.lines if changes else -1,
    )


def _mask_words(vocab: int) -> int:
    return -(-vocab // 32)


def _mask(draw: Draw, vocab: int) -> Int32:
    return _NONE if draw.allowed is None else draw.allowed[: _mask_words(vocab)].view(np.int32)


def _biases(draw: Draw) -> Int32:
    """Ids, ascending, then the biases of these as float32: at most one behind a ban, which none changes."""
    if not draw.bias_ids:
        return _NONE
    ids, values = np.array(draw.bias_ids, np.int32), np.array(draw.bias, np.float32)
    order = np.argsort(ids, kind="stable")
    ids, values = ids[order], values[order]
    changes = np.ones(len(ids), np.bool_)
    changes[1:] = (ids[1:] != ids[:-1]) | np.isfinite(values[:-1])
    return np.concatenate([ids[changes], values[changes].view(np.int32)])
