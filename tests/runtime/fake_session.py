"""A Session whose "model" is a hash of every token before: wrong blocks, positions or counts give wrong tokens."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ingot.plan import Limits
from ingot.plugins.ops.sample import Draw, Drawn
from ingot.plugins.sequences import Sequences, drawing_slots
from ingot.step_io import LAST_DRAWN, Ahead, Ending, Float32, Int32, SequenceRules, StepBatch, StepResult

VOCAB = 97
_NOBODY = -1


def next_token(tokens: Sequence[int]) -> int:
    """What follows `tokens`."""
    return sum((place + 3) * (token + 1) ** 2 for place, token in enumerate(tokens)) % VOCAB


def continued(prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeSession:
    """Keeps tokens where a real session keeps keys and values, and checks every step against the limits.

    windows      of the cache groups; the first is 0: what follows depends on all tokens
    states       of the groups, whether it keeps states: these are the tokens that they are made of
    before_step  called with each batch; may sleep or raise
    """

    most_steps = 1
    takes_drafts = False

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        tokens_per_block: int,
        limits: Limits,
        windows: Sequence[int] = (0,),
        states: Sequence[bool] = (),
    ) -> None:
        self.num_blocks = (num_blocks,) if isinstance(num_blocks, int) else tuple(num_blocks)
        self._limits, self._windows = limits, windows
        self.pools = [np.full((count, tokens_per_block), _NOBODY) for count in self.num_blocks]
        self._states: dict[int, dict[int, list[int]]] = {group: {} for group, kept in enumerate(states) if kept}
        self.before_step: Callable[[StepBatch], None] = lambda batch: None
        self.closed = False
        self._sequences = Sequences()

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        assert 0 <= slot < self._limits.max_batch_size
        self._sequences.start(slot, rules, tokens, num_prompt)

    def end(self, slot: int) -> None:
        self._sequences.end(slot)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        assert not self.closed
        batch = self._sequences.complete(batch)
        draws = self._sequences.draws(batch)
        drawn, logits = self._compute(batch, draws)
        result = self._sequences.record(batch, drawn)
        return dataclasses.replace(result, logits=logits if batch.want_logits else None)

    def _compute(self, batch: StepBatch, draws: Sequence[Draw]) -> tuple[Drawn, Float32]:
        self.before_step(batch)
        sequences = len(batch.past_lengths)
        assert 1 <= sequences <= self._limits.max_batch_size
        assert 1 <= len(batch.ids) <= self._limits.max_num_tokens
        assert len(batch.logit_rows) <= self._limits.max_logit_rows
        assert batch.query_starts[0] == 0
        assert batch.query_starts[-1] == len(batch.ids)
        self._check_sharing(batch)
        following = np.full(len(batch.ids), _NOBODY)
        for s in range(sequences):
            begin, end = batch.query_starts[s], batch.query_starts[s + 1]
            past = int(batch.past_lengths[s])
            known = self._written(0, batch, s)
            for group in range(1, len(self.pools)):
                if group in self._states:
                    self._carry_state(group, batch, s, known)
                    continue
                seen = self._written(group, batch, s)
                assert seen == known[len(known) - len(seen) :], "a group with a window has other tokens"
            for t in np.intersect1d(np.arange(begin, end), batch.logit_rows):
                following[t] = next_token(known[: past + t - begin + 1])
        chosen = following[batch.logit_rows]
        logits = np.where(chosen[:, None] == np.arange(VOCAB), 9, 0).astype(np.float32)
        ids = chosen[batch.draws].astype(np.int32)
        # stands for whatever depends on the draw alone: seed and counter
        log_probs = np.array([-float(draw.rules.seed + draw.counter) for draw in draws], np.float32)
        return Drawn(ids=ids, log_probs=log_probs), logits

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        return self._sequences.draw(slots, logits, raw)

    def close(self) -> None:
        self.closed = True

    def _written(self, group: int, batch: StepBatch, s: int) -> list[int]:
        """The tokens that a group has of a sequence, with those of this step: all that the first of these sees."""
        slots, window, table = self.pools[group], self._windows[group], batch.block_tables[group, s]
        begin, end, past = batch.query_starts[s], batch.query_starts[s + 1], int(batch.past_lengths[s])
        total, size = int(past + end - begin), slots.shape[1]
        for position in range(past, total):
            assert table[position // size] >= 0
            slots[table[position // size], position % size] = batch.ids[begin + position - past]
        first = max(past + 1 - window, 0) if window else 0
        assert (table[first // size : -(-total // size)] >= 0).all(), "a block that the step sees is not there"
        known = slots[table[np.arange(first, total) // size], np.arange(first, total) % size]
        assert (known != _NOBODY).all(), "a slot nobody wrote"
        found: list[int] = known.tolist()
        return found

    def _carry_state(self, group: int, batch: StepBatch, s: int, known: list[int]) -> None:
        """From the slot of the block that the sequence has come to, to those that its table has for this step."""
        states, table, size = self._states[group], batch.block_tables[group, s].tolist(), self.pools[group].shape[1]
        past, total = int(batch.past_lengths[s]), len(known)
        if past:
            assert states[table[(past - 1) // size]] == known[:past], "a state of other tokens"
        assert table[(total - 1) // size] >= 0, "no slot for what the step leaves"
        for place in range(past // size, -(-total // size)):
            if table[place] >= 0:
                states[table[place]] = known[: (place + 1) * size]

    def _check_sharing(self, batch: StepBatch) -> None:
        """A block in two tables is full in both and stays as it is; the others hold nothing yet from `past` on."""
        for group, (slots, tables) in enumerate(zip(self.pools, batch.block_tables, strict=True)):
            kept = self._states.get(group, {})
            size = slots.shape[1]
            holders = Counter(int(block) for table in tables for block in table if block >= 0)
            for past, table in zip(batch.past_lengths.tolist(), tables.tolist(), strict=True):
                for place, block in enumerate(table):
                    if block >= 0 and (place + 1) * size > past:
                        assert holders[block] == 1, "a block that is not full in two tables"
                        slots[block, max(past - place * size, 0) :] = _NOBODY
                        if place * size >= past:
                            kept.pop(block, None)


class SubmittingSession(FakeSession):
    """Computes a step as late as it may: when somebody waits for it. followed: how often a step was submitted while
    another one was under way.
    """

    def __init__(
        self, num_blocks: int | Sequence[int], tokens_per_block: int, limits: Limits, windows: Sequence[int] = (0,)
    ) -> None:
        super().__init__(num_blocks, tokens_per_block, limits, windows)
        self.followed = 0
        self._submitted: list[tuple[StepBatch, Sequence[Draw], Callable[[Drawn], StepResult]]] = []
        self._drawn: dict[int, int] = {}  # by slot

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        assert not self._submitted
        super().start(slot, rules, tokens, num_prompt)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        assert not self._submitted
        self.submit(batch)
        logits: list[Float32] = []
        result = self._finish(logits)
        return dataclasses.replace(result, logits=logits[0] if batch.want_logits else None)

    def submit(self, batch: StepBatch) -> None:
        assert len(self._submitted) < 2
        assert not self.closed
        self.followed += len(self._submitted)
        batch = self._sequences.complete(batch)
        draws = self._sequences.draws(batch)
        self._submitted.append((batch, draws, self._sequences.submit(batch)))

    def wait(self) -> StepResult:
        return self._finish([])

    def drop(self) -> None:
        self._submitted.clear()

    def _finish(self, logits: list[Float32]) -> StepResult:
        batch, draws, record = self._submitted.pop(0)
        ids = np.array([self._drawn[-1 - token] if token < 0 else token for token in batch.ids.tolist()], np.int32)
        drawn, rows = self._compute(dataclasses.replace(batch, ids=ids), draws)
        self._drawn |= dict(zip(drawing_slots(batch).tolist(), drawn.ids.tolist(), strict=True))
        logits.append(rows)
        return record(drawn)


class RepeatingSession(FakeSession):
    """Goes on by itself. repeated: how many steps each run of several brought."""

    most_steps = 128

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        tokens_per_block: int,
        limits: Limits,
        windows: Sequence[int] = (0,),
        states: Sequence[bool] = (),
    ) -> None:
        super().__init__(num_blocks, tokens_per_block, limits, windows, states)
        self.repeated: list[int] = []

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        if ahead is None:
            return super().run(batch)
        results = run_singly(super().run, batch, ahead)
        self.repeated.append(len(results.ids))
        return results


def run_singly(run: Callable[[StepBatch], StepResult], batch: StepBatch, ahead: Ahead) -> StepResult:
    """What `ahead` means, step by step."""
    begin = time.monotonic()
    results = [run(batch)]
    while (
        len(results) < ahead.most_steps
        and (results[-1].ends == Ending.NONE).all()
        and time.monotonic() - begin < ahead.seconds
        and not ahead.stop[0]
    ):
        last = np.full(len(batch.ids), LAST_DRAWN, np.int32)
        batch = dataclasses.replace(batch, ids=last, past_lengths=batch.past_lengths + np.int32(1))
        results.append(run(batch))

    def stacked(name: str) -> Any:
        arrays = [getattr(result, name) for result in results]
        return None if arrays[0] is None else np.concatenate(arrays)

    names = ("ids", "log_probs", "token_ranks", "top_ids", "top_log_probs")
    return StepResult(ends=results[-1].ends, **{name: stacked(name) for name in names})
