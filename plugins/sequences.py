"""What a session holds of its sequences: the specification, for sessions that draw on the host.

start ─▶ [rules, tokens] ──draws──▶ Draw ──sample──▶ token ──take──▶ [rules, tokens + 1] ─▶ ... ─▶ Ending

A session that submits steps makes a draw before the token of the one before it is known.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from ingot.errors import RequestError
from ingot.plugins.op import Array
from ingot.plugins.ops.sample import Draw, Drawn, sample
from ingot.step_io import LAST_DRAWN, Ending, Float32, Int32, SequenceRules, StepBatch, StepResult, UInt32


class _Held:
    """One sequence. tokens: the prompt and what was generated; submitted: draws whose tokens are not known yet."""

    def __init__(self, rules: SequenceRules, tokens: list[int], num_prompt: int) -> None:
        self.rules, self.tokens, self.num_prompt = rules, tokens, num_prompt
        self.ending = Ending.NONE
        self.submitted = 0
        self._banned = [word[0] for word in rules.bad_words if len(word) == 1]
        self._words_after: dict[int, list[tuple[int, ...]]] = {}  # the others, by the token before the last
        for word in rules.bad_words:
            if len(word) > 1:
                self._words_after.setdefault(word[-2], []).append(word)
        self._reasons = False  # the end of the reasoning has not come yet: then the grammar waits
        self._begin_grammar(tokens[num_prompt:])

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def history(self) -> Sequence[int]:
        """Its tokens, where they matter to the logits."""
        return self.tokens if self.rules.penalises else ()

    def draw(self, row: int) -> Draw:
        """The next one, from this row of logits."""
        if self.ending is not Ending.NONE:
            raise RequestError("a sequence that has ended draws no more", got=self.ending.name)
        rules, counter = self.rules, self.num_generated + self.submitted
        if self.submitted and (rules.follows_tokens or counter >= rules.max_tokens):
            raise RequestError("this sequence's next draw depends on a token that is not known yet")
        words = self._words_after.get(self.tokens[-1], ())
        banned = self._banned + [word[-1] for word in words if self._generated_end_with(word[:-1])]
        ends_too_early = counter < rules.min_tokens and not self._over_budget
        if ends_too_early or (self._reasons and rules.grammar is not None):  # it would end before its grammar begins
            banned += rules.end_ids
        return Draw(
            row=row,
            rules=rules,
            counter=counter,
            allowed=self._allowed(),
            bias_ids=[*(token for token, _ in rules.logit_bias), *banned],
            bias=[*(bias for _, bias in rules.logit_bias), *[-np.inf] * len(banned)],
            history=self.history,
            num_prompt=self.num_prompt,
        )

    def append(self, token: int, log_prob: float) -> None:
        """Add what was drawn. Draws that were submitted before the sequence ended count for nothing."""
        self.submitted = max(self.submitted - 1, 0)
        if self.ending is not Ending.NONE:
            return
        if token < 0 or not np.isfinite(log_prob):
            self.ending = Ending.FAILED
            return
        self._reasons = self._reasons or (self._may_begin_to_reason and token == self.rules.reasoning_begin)
        self.tokens.append(token)
        grammar = None if self._reasons else self.rules.grammar
        grammar_ends = grammar is not None and grammar.consume(token)
        self._reasons = self._reasons and not self._generated_end_with(self.rules.reasoning_end)
        stops = token in self.rules.end_ids or any(self._generated_end_with(word) for word in self.rules.stop_words)
        if grammar_ends or (stops and self.num_generated >= self.rules.min_tokens):
            self.ending = Ending.STOP
        elif self.num_generated >= self.rules.max_tokens:
            self.ending = Ending.LENGTH

    @property
    def _may_begin_to_reason(self) -> bool:
        """Whether the token to come tells if the sequence reasons."""
        rules = self.rules
        return bool(rules.reasoning_end) and rules.reasoning_begin is not None and self.num_generated == 0

    @property
    def _over_budget(self) -> bool:
        budget = self.rules.reasoning_budget
        return self._reasons and budget is not None and self.num_generated >= budget

    def _allowed(self) -> UInt32 | None:
        """What may come next, see Draw."""
        if not self._reasons:
            mask = None if self.rules.grammar is None else self.rules.grammar.allowed()
            if mask is None or not self._may_begin_to_reason:
                return mask
            return _with_token(mask, self.rules.reasoning_begin or 0)
        if not self._over_budget:
            return None
        end = self.rules.reasoning_end
        token = end[next(n for n in range(len(end) - 1, -1, -1) if self._generated_end_with(end[:n]))]
        return _with_token(np.zeros(0, np.uint32), token)

    def _begin_grammar(self, generated: list[int]) -> None:
        """Also where the grammar has seen some of these tokens, or more."""
        end, first, grammar = list(self.rules.reasoning_end), self.rules.reasoning_begin, self.rules.grammar
        if first is not None and generated[:1] != [first]:
            end = []  # it does not reason, or its first token will tell
        begins = range(len(generated) - len(end) + 1)
        behind = next((n + len(end) for n in begins if generated[n : n + len(end)] == end), None) if end else 0
        self._reasons = behind is None
        if grammar is None:
            return
        if not grammar.reset():
            raise RequestError(
                "the grammar of this sequence has failed before", hint="start the sequence with a new grammar"
            )
        for token in () if behind is None else generated[behind:]:
            grammar.consume(token)

    def _generated_end_with(self, word: Sequence[int]) -> bool:
        """A word does not begin in the prompt."""
        return len(word) <= self.num_generated and self.tokens[len(self.tokens) - len(word) :] == list(word)


def _with_token(mask: UInt32, token: int) -> UInt32:
    """A mask that allows one more."""
    found = np.zeros(max(len(mask), token // 32 + 1), np.uint32)
    found[: len(mask)] = mask
    found[token // 32] |= np.uint32(1 << token % 32)
    return found


class Sequences:
    """Those of one session, by slot."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """See Session.start."""
        if not num_prompt <= len(tokens) < num_prompt + rules.max_tokens:
            raise RequestError(
                "a sequence cannot start with this number of tokens",
                expected=f"{num_prompt} tokens of a prompt and less than {rules.max_tokens} others",
                got=f"{len(tokens)} tokens",
            )
        self._held[slot] = _Held(rules, tokens.tolist(), num_prompt)

    def end(self, slot: int) -> None:
        """See Session.end."""
        self._held.pop(slot, None)

    def complete(self, batch: StepBatch) -> StepBatch:
        """The batch with the tokens that it leaves to the session; -1 - slot stands for one that is not known yet."""
        if not (batch.ids == LAST_DRAWN).any():
            return batch
        ids = batch.ids.copy()
        for slot, first in zip(batch.slots.tolist(), batch.query_starts.tolist(), strict=False):
            if ids[first] == LAST_DRAWN:
                held = self._at(slot)
                ids[first] = -1 - slot if held.submitted else held.tokens[-1]
        return dataclasses.replace(batch, ids=ids)

    def draws(self, batch: StepBatch) -> list[Draw]:
        """Those of a step: for sequences, then of known tokens. Raises RequestError where a sequence cannot draw."""
        drawn = [self._at(slot).draw(row) for slot, row in zip(drawing_slots(batch), batch.draws.tolist(), strict=True)]
        known = batch.known
        if known is None:
            return drawn
        rows = zip(known.row.tolist(), known.token.tolist(), known.top.tolist(), strict=True)
        return drawn + [Draw(row=row, rules=SequenceRules(top=top), known=token) for row, token, top in rows]

    def record(self, batch: StepBatch, drawn: Drawn) -> StepResult:
        """Move the sequences of a step on by what was drawn for them."""
        return _record([self._at(slot) for slot in drawing_slots(batch)], drawn)

    def submit(self, batch: StepBatch) -> Callable[[Drawn], StepResult]:
        """Note that the draws of a step are under way. Gives what `record` does, for these sequences, when they are
        there: whatever becomes of the slots until then.
        """
        held = [self._at(slot) for slot in drawing_slots(batch)]
        for each in held:
            each.submitted += 1
        return functools.partial(_record, held)

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """See Session.draw."""
        drawn = [self._at(slot).draw(row) for row, slot in enumerate(slots.tolist())]
        return _record([self._at(slot) for slot in slots.tolist()], sample(raw, drawn, logits))

    def history(self, slot: int) -> Sequence[int]:
        """The tokens of a sequence with penalties; () of any other."""
        return self._at(slot).history

    def _at(self, slot: int) -> _Held:
        if slot not in self._held:
            raise RequestError("a step draws for a sequence that was not started", got=f"slot {slot}")
        return self._held[slot]


def _record(held: Sequence[_Held], drawn: Drawn) -> StepResult:
    for each, token, log_prob in zip(held, drawn.ids.tolist(), drawn.log_probs.tolist(), strict=False):
        each.append(token, log_prob)
    return StepResult(
        ids=drawn.ids[None],
        log_probs=drawn.log_probs[None],
        ends=np.array([each.ending for each in held], dtype=np.int32),
        token_ranks=None if drawn.token_ranks is None else drawn.token_ranks[None],
        top_ids=None if drawn.top_ids is None else drawn.top_ids[None],
        top_log_probs=None if drawn.top_log_probs is None else drawn.top_log_probs[None],
    )


def drawing_slots(batch: StepBatch) -> list[int]:
    """Where the sequences are that draw."""
    tokens = batch.logit_rows[batch.draws]
    slots: list[int] = batch.slots[np.searchsorted(batch.query_starts, tokens, side="right") - 1].tolist()
    return slots


def step_result(sequences: Sequences, batch: StepBatch, logits: Array) -> StepResult:
    """The draws of a step on the host, from its logits float32 [R, vocab]."""
    result = sequences.record(batch, sample(logits, sequences.draws(batch)))
    return dataclasses.replace(result, logits=logits.copy()) if batch.want_logits else result
