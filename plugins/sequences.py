"""What a session holds of its sequences: the specification, for sessions that draw on the host.

start ─▶ [rules, tokens] ──draws──▶ Draw ──sample──▶ token ──take──▶ [rules, tokens + 1] ─▶ ... ─▶ Ending

A session that submits steps makes a draw before the token of the one before it is known. Sequences whose draws depend
on no token are moved on together (plain_sequences.py), the others one by one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import RequestError
from ingot.plugins.drafted_draws import DraftedRun, drafted_runs, draws_of, keep_counted
from ingot.plugins.op import Array
from ingot.plugins.ops.sample import Draw, Drawn, sample
from ingot.plugins.plain_sequences import PlainSequences, is_plain
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
        self._assumed, self._beyond = 0, False  # tokens of the grammar alone; whether what follows them cannot count
        self._mask: UInt32 | None = None  # of the last draw
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
            allowed=self._next_mask(),
            bias_ids=[*(token for token, _ in rules.logit_bias), *banned],
            bias=[*(bias for _, bias in rules.logit_bias), *[-np.inf] * len(banned)],
            history=self.history,
            num_prompt=self.num_prompt,
        )

    def assume(self, token: int) -> None:
        """Go on as if this had been drawn, until `take_back`."""
        self.tokens.append(token)
        grammar, mask = self.rules.grammar, self._mask
        if grammar is None or self._beyond:
            return
        if mask is None or token // 32 >= len(mask) or not int(mask[token // 32]) >> token % 32 & 1:
            self._beyond = True
            return
        self._assumed += 1
        self._beyond = grammar.consume(token)

    def take_back(self, known: int) -> None:
        """Forget all but `known` tokens, which were assumed."""
        del self.tokens[known:]
        if self._assumed and self.rules.grammar is not None:
            self.rules.grammar.rollback(self._assumed)  # where that fails, the next mask shows it
        self._assumed, self._beyond = 0, False

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

    def _next_mask(self) -> UInt32 | None:
        self._mask = None if self._beyond else self._allowed()
        return self._mask

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """The sequences that draw in a step, in the order of its draws.

    slots         int32 [Q]
    plain         places in it of plain sequences, ascending
    plain_slots   these sequences' slots
    others, held  the other places, and what is held of the sequences there
    """

    slots: Int32
    plain_slots: Int32
    plain: npt.NDArray[np.intp]
    others: list[int]
    held: Sequence[_Held]


class Sequences:
    """Those of one session, by slot. plain: those of them whose draws depend on no token; changes: how often one began
    or ended."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self.plain = PlainSequences()
        self.changes = 0

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """See Session.start."""
        if not num_prompt <= len(tokens) < num_prompt + rules.max_tokens:
            raise RequestError(
                "a sequence cannot start with this number of tokens",
                expected=f"{num_prompt} tokens of a prompt and less than {rules.max_tokens} others",
                got=f"{len(tokens)} tokens",
            )
        self.end(slot)
        if is_plain(rules):
            self.plain.start(slot, rules, tokens, num_prompt)
        else:
            self._held[slot] = _Held(rules, tokens.tolist(), num_prompt)

    def end(self, slot: int) -> None:
        """See Session.end."""
        self.changes += 1
        self._held.pop(slot, None)
        self.plain.end(slot)

    def complete(self, batch: StepBatch) -> StepBatch:
        """The batch with the tokens that it leaves to the session; -1 - slot stands for one that is not known yet. A
        batch that breaks the contract comes back as it is: who checks it says what is wrong."""
        firsts = batch.query_starts[:-1]
        if len(firsts) != len(batch.slots) or ((firsts < 0) | (firsts >= len(batch.ids))).any():
            return batch
        (left,) = np.nonzero(batch.ids[firsts] == LAST_DRAWN)
        if not len(left):
            return batch
        ids, slots = batch.ids.copy(), batch.slots[left]
        known = self.plain.has(slots)
        plain, places = slots[known], firsts[left[known]]
        ids[places] = self.plain.next_inputs(plain)
        for slot, first in zip(slots[~known].tolist(), firsts[left[~known]].tolist(), strict=True):
            held = self._at(slot)
            ids[first] = -1 - slot if held.submitted else held.tokens[-1]
        return dataclasses.replace(batch, ids=ids)

    def drawing(self, batch: StepBatch) -> Drawing:
        """Who draws in a step. Raises RequestError for a slot without a sequence."""
        return self._drawing(drawing_slots(batch))

    def draws(self, batch: StepBatch) -> list[Draw]:
        """Those of a step: for sequences, then of known tokens. Raises RequestError where a sequence cannot draw."""
        if runs := drafted_runs(batch, drawing_slots(batch)):
            return [draw for run in runs for draw in self._draws_of(run)] + known_draws(batch)
        return self._draws(self.drawing(batch), batch.draws) + known_draws(batch)

    def record(self, batch: StepBatch, drawn: Drawn) -> StepResult:
        """Move the sequences of a step on by what was drawn for them."""
        if runs := drafted_runs(batch, drawing_slots(batch)):
            return _step_result(*keep_counted(runs, drawn, self._append))
        return self._record(self.drawing(batch), drawn)

    def submit(self, batch: StepBatch) -> Callable[[Drawn], StepResult]:
        """Note that the draws of a step are under way. Gives what `record` does, for these sequences, when they are
        there: whatever becomes of the slots until then.
        """
        return self.submit_drawing(self.drawing(batch))

    def submit_drawing(self, drawing: Drawing) -> Callable[[Drawn], StepResult]:
        """`submit`, where it is known who draws."""
        self.plain.submit(drawing.plain_slots)
        for each in drawing.held:
            each.submitted += 1
        return functools.partial(self._record, drawing, submitted=True)

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """See Session.draw."""
        drawing = self._drawing(slots)
        return self._record(drawing, sample(raw, self._draws(drawing, np.arange(len(slots), dtype=np.int32)), logits))

    def history(self, slot: int) -> Sequence[int]:
        """The tokens of a sequence with penalties; () of any other."""
        return () if slot in self.plain.rules else self._at(slot).history

    def _at(self, slot: int) -> _Held:
        if slot not in self._held:
            raise RequestError("a step draws for a sequence that was not started", got=f"slot {slot}")
        return self._held[slot]

    def _drawing(self, slots: Int32) -> Drawing:
        known = self.plain.has(slots)
        if known.all():
            return Drawing(slots=slots, plain=np.arange(len(slots)), plain_slots=slots, others=[], held=[])
        others, plain = np.flatnonzero(~known).tolist(), np.flatnonzero(known)
        held = [self._at(slot) for slot in slots[others].tolist()]
        return Drawing(slots=slots, plain=plain, plain_slots=slots[plain], others=others, held=held)

    def _draws(self, drawing: Drawing, rows: Int32) -> list[Draw]:
        """One for each row of logits."""
        slots = drawing.plain_slots
        columns = (slots, self.plain.counters(slots), self.plain.num_prompt(slots), drawing.plain, rows[drawing.plain])
        found = {
            place: Draw(row=row, rules=self.plain.rules[slot], counter=counter, num_prompt=num_prompt)
            for slot, counter, num_prompt, place, row in zip(*(each.tolist() for each in columns), strict=True)
        }
        found |= {place: each.draw(int(rows[place])) for place, each in zip(drawing.others, drawing.held, strict=True)}
        return [found[place] for place in range(len(rows))]

    def _draws_of(self, run: DraftedRun) -> list[Draw]:
        """Those of one sequence, which may have drafts."""
        if run.slot in self.plain.rules:
            slots, rules = np.array([run.slot], np.int32), self.plain.rules[run.slot]
            (counter,), (num_prompt,) = self.plain.counters(slots).tolist(), self.plain.num_prompt(slots).tolist()
            counters = itertools.count(counter)

            def next_plain(row: int) -> Draw:
                return Draw(row=row, rules=rules, counter=next(counters), num_prompt=num_prompt)

            return draws_of(run, next_plain, lambda draft: None, rules.max_tokens - counter, False)
        held = self._at(run.slot)
        known = len(held.tokens)

        def next_held(row: int) -> Draw:
            draw = held.draw(row)
            return dataclasses.replace(draw, history=tuple(draw.history)) if run.drafts else draw

        try:
            most = held.rules.max_tokens - held.num_generated
            return draws_of(run, next_held, held.assume, most, bool(held.rules.reasoning_end))
        finally:
            held.take_back(known)

    def _append(self, slot: int, token: int, log_prob: float) -> Ending:
        if slot in self.plain.rules:
            one = np.array([slot], np.int32), np.array([token], np.int32), np.array([log_prob], np.float32)
            return Ending(int(self.plain.record(*one, submitted=False)[0]))
        held = self._at(slot)
        held.append(token, log_prob)
        return held.ending

    def _record(self, drawing: Drawing, drawn: Drawn, *, submitted: bool = False) -> StepResult:
        plain, count = drawing.plain, len(drawing.slots)
        if not drawing.others:
            ends = self.plain.record(drawing.slots, drawn.ids[:count], drawn.log_probs[:count], submitted=submitted)
        else:
            ends = np.zeros(count, np.int32)
            own = drawn.ids[plain], drawn.log_probs[plain]
            ends[plain] = self.plain.record(drawing.plain_slots, *own, submitted=submitted)
        for place, each in zip(drawing.others, drawing.held, strict=True):
            each.append(int(drawn.ids[place]), float(drawn.log_probs[place]))
            ends[place] = each.ending
        return _step_result(drawn, ends)


def _step_result(drawn: Drawn, ends: Int32) -> StepResult:
    return StepResult(
        ids=drawn.ids[None],
        log_probs=drawn.log_probs[None],
        ends=ends,
        token_ranks=None if drawn.token_ranks is None else drawn.token_ranks[None],
        top_ids=None if drawn.top_ids is None else drawn.top_ids[None],
        top_log_probs=None if drawn.top_log_probs is None else drawn.top_log_probs[None],
    )


def drawing_slots(batch: StepBatch) -> Int32:
    """Where the sequences are that draw."""
    tokens = batch.logit_rows[batch.draws]
    slots: Int32 = batch.slots[np.searchsorted(batch.query_starts, tokens, side="right") - 1]
    return slots


def known_draws(batch: StepBatch) -> list[Draw]:
    """Those of known tokens, whose probabilities are wanted."""
    if batch.known is None:
        return []
    columns = (batch.known.row.tolist(), batch.known.token.tolist(), batch.known.top.tolist())
    return [Draw(row=row, rules=SequenceRules(top=top), known=token) for row, token, top in zip(*columns, strict=True)]


def step_result(sequences: Sequences, batch: StepBatch, logits: Array) -> StepResult:
    """The draws of a step on the host, from its logits float32 [R, vocab]."""
    result = sequences.record(batch, sample(logits, sequences.draws(batch)))
    return dataclasses.replace(result, logits=logits.copy()) if batch.want_logits else result
