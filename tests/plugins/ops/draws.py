"""Draws as sequences of their own: each from a row of given logits, with its rules and tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.plugins.op import Array
from ingot.plugins.sequences import Sequences
from ingot.step_io import SequenceRules, StepBatch, StepResult
from tests.plugins.cpu.one_step import batch_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """generated: those of its tokens that are not prompt."""

    row: int
    rules: SequenceRules = dataclasses.field(default_factory=SequenceRules)
    prompt: Sequence[int] = (0,)
    generated: Sequence[int] = ()


def start_all(session: object, drawings: Sequence[Drawing]) -> None:
    """Draw q is of slot q. session: whatever has a `start`."""
    for slot, each in enumerate(drawings):
        tokens = np.array([*each.prompt, *each.generated], np.int32)
        session.start(slot, each.rules, tokens, len(each.prompt))  # type: ignore[attr-defined]


def rows_of(logits: Array, drawings: Sequence[Drawing]) -> Array:
    """The logits of each draw, float32 [Q, vocab]."""
    return logits[[each.row for each in drawings]]


def expected_draws(logits: Array, drawings: Sequence[Drawing]) -> StepResult:
    """By the specification."""
    sequences, rows = Sequences(), rows_of(logits, drawings)
    start_all(sequences, drawings)
    return sequences.draw(np.arange(len(drawings), dtype=np.int32), rows, rows)


def drawing_batch(count: int) -> StepBatch:
    """A step of so many sequences, each of which computes one token and draws."""
    parts, tables = [(0, 1)] * count, [[block] for block in range(count)]
    return batch_of(parts, tables, range(count), draws=range(count), ids=np.zeros(count, np.int32))


def random_rules(rng: np.random.Generator, vocab: int) -> SequenceRules:
    """Every rule at random; words of few tokens, so that some come to be."""

    def words(most: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rng.integers(0, 24, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(0, most)))

    fields: dict[str, Any] = {
        "temperature": float(rng.choice([0, 0.8, 2])),
        "top_k": int(rng.choice([0, 9])),
        "top_p": float(rng.choice([1, 0.9])),
        "seed": int(rng.integers(0, 2**63)),
        "end_ids": tuple(rng.integers(0, vocab, rng.integers(0, 3)).tolist()),
        "stop_words": words(4),
        "max_tokens": int(rng.integers(3, 30)),
        "top": None if rng.random() < 0.5 else int(rng.integers(0, 4)),
    }
    if rng.random() < 0.6:
        fields |= {
            "min_p": float(rng.choice([0, 0.05])),
            "repetition_penalty": float(rng.choice([1, 1.4])),
            "frequency_penalty": float(rng.choice([0, 0.6])),
            "presence_penalty": float(rng.choice([0, -0.7])),
            "logit_bias": tuple((int(t), float(rng.choice([-np.inf, 1.5]))) for t in rng.integers(0, vocab, 3)),
            "bad_words": words(40),
            "min_tokens": int(rng.choice([0, 8])),
        }
    return SequenceRules(**fields)
