"""Sequences that are moved on together end, fail and draw as those that are moved on one by one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.plugins import sequences
from ingot.plugins.ops.sample import Drawn
from ingot.plugins.plain_sequences import is_plain
from ingot.plugins.sequences import Sequences
from ingot.step_io import LAST_DRAWN, Ending, SequenceRules, StepBatch, StepResult
from tests.plugins.cpu.one_step import batch_of

VOCAB = 12


def decode_batch(slots: list[int]) -> StepBatch:
    count = len(slots)
    ids = np.full(count, LAST_DRAWN, np.int32)
    batch = batch_of([(3, 1)] * count, [[0]] * count, range(count), draws=range(count), ids=ids)
    batch.slots[:] = slots
    return batch


def some_rules(random: np.random.Generator, slot: int) -> SequenceRules:
    """Those of even slots are plain."""
    words = tuple((int(token),) for token in random.integers(0, VOCAB, random.integers(0, 3)))
    return SequenceRules(
        temperature=float(random.choice([0, 1])),
        end_ids=tuple(random.integers(0, VOCAB, random.integers(0, 3)).tolist()),
        stop_words=words if slot % 2 == 0 else (*words, (1, 2)),
        max_tokens=int(random.integers(2, 20)),
        min_tokens=0 if slot % 2 == 0 else int(random.integers(0, 3)),
    )


def test_which_sequences_are_plain() -> None:
    plain: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"end_ids": (1,), "stop_words": ((2,),)},
    ]
    plain += [{"min_tokens": 5}]
    others: list[dict[str, Any]] = [
        {"stop_words": ((1, 2),)},
        {"bad_words": ((1,),)},
        {"presence_penalty": 1.0},
        {"top": 0},
    ]
    others += [{"logit_bias": ((1, 1.0),)}, {"min_tokens": 5, "end_ids": (1,)}, {"reasoning_end": (1,)}]
    others += [{"end_ids": tuple(range(9))}]
    assert all(is_plain(SequenceRules(**each)) for each in plain)
    assert not any(is_plain(SequenceRules(**each)) for each in others)


@pytest.mark.parametrize("seed", range(12))
def test_steps_of_plain_and_other_sequences(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two steps under way at a time; some draws fail, and sequences that have ended begin again in the same slots."""
    random = np.random.default_rng(seed)
    together, singly = Sequences(), Sequences()
    rules: dict[int, SequenceRules] = {}

    def begin(slot: int) -> None:
        rules[slot] = some_rules(random, slot)
        tokens = random.integers(0, VOCAB, 4).astype(np.int32)
        together.start(slot, rules[slot], tokens, 3)
        with monkeypatch.context() as patch:
            patch.setattr(sequences, "is_plain", lambda rules: False)
            singly.start(slot, rules[slot], tokens, 3)

    for slot in range(7):
        begin(slot)
    assert sorted(together.plain.rules) == [0, 2, 4, 6]
    assert not singly.plain.rules
    way: list[tuple[list[int], list[Callable[[Drawn], StepResult]]]] = []
    ended: set[int] = set()
    for _ in range(40):
        slots = [slot for slot in random.permutation(7).tolist() if slot not in ended]
        slots = [slot for slot in slots if random.random() < 0.8 and not any(slot in each for each, _ in way)]
        if slots and len(way) < 2:
            batch = decode_batch(slots)
            completed = [each.complete(batch).ids.tolist() for each in (together, singly)]
            assert completed[0] == completed[1]
            draws = [each.draws(batch) for each in (together, singly)]
            assert [draw.counter for draw in draws[0]] == [draw.counter for draw in draws[1]]
            assert [draw.row for draw in draws[0]] == list(range(len(slots)))
            way.append((slots, [each.submit(batch) for each in (together, singly)]))
            continue
        if not way:
            for slot in sorted(ended):
                begin(slot)
            ended.clear()
            continue
        slots, records = way.pop(0)
        ids = np.where(random.random(len(slots)) < 0.05, -1, random.integers(0, VOCAB, len(slots))).astype(np.int32)
        drawn = Drawn(ids=ids, log_probs=np.where(ids < 0, -np.inf, -1).astype(np.float32))
        ends = [record(drawn).ends.tolist() for record in records]
        assert ends[0] == ends[1]
        ended |= {slot for slot, end in zip(slots, ends[0], strict=True) if end != Ending.NONE}


def test_a_second_step_ahead_knows_no_token() -> None:
    held = Sequences()
    for slot, most in ((3, 5), (1, 2)):
        held.start(slot, SequenceRules(max_tokens=most), np.array([7, 8, 9], np.int32), 3)
    batch = decode_batch([3, 1])
    assert held.complete(batch).ids.tolist() == [9, 9]
    record = held.submit(batch)
    assert held.complete(batch).ids.tolist() == [-4, -2]
    later = held.submit(batch)
    with pytest.raises(RequestError, match="not known yet"):
        held.draws(batch)
    drawn = Drawn(ids=np.array([4, 5], np.int32), log_probs=np.full(2, -1, np.float32))
    assert record(drawn).ends.tolist() == [Ending.NONE, Ending.NONE]
    assert held.complete(batch).ids.tolist() == [-4, -2]
    assert later(drawn).ends.tolist() == [Ending.NONE, Ending.LENGTH]
    with pytest.raises(RequestError, match="has ended draws no more"):
        held.draws(batch)
    held.end(1)
    with pytest.raises(RequestError, match="was not started"):
        held.draws(batch)
