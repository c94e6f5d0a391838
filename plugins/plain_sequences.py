"""Sequences of a session whose next draw depends on none of their tokens: arrays by slot, moved on all at once.

slots of a step ─▶ counters ─▶ draws ─▶ tokens ─▶ last token, number of tokens, Ending: one operation each for all

`sequences.py` says what sequences are; those in here are most, and stand as they would there.
"""

import math

import numpy as np
import numpy.typing as npt

from ingot.errors import RequestError
from ingot.step_io import Ending, Float32, Int32, SequenceRules

_MOST_ENDS = 8  # tokens that end a sequence in here
_NO_TOKEN = -2
_LAST, _GENERATED, _SUBMITTED, _ENDING, _MOST, _PROMPT = range(6)  # last: the last known token; submitted: draws whose
_COLUMNS = 6  # tokens are not known yet; most: tokens that may be generated

Bools = npt.NDArray[np.bool_]


def is_plain(rules: SequenceRules) -> bool:
    """Whether a sequence may be in here: no token changes its logits, and a single token tells whether it ends."""
    ends = len(rules.end_ids) + len(rules.stop_words)
    edits = rules.penalises or rules.guided or bool(rules.logit_bias or rules.bad_words) or rules.top is not None
    late = rules.min_tokens > 0 and ends > 0
    return not edits and not late and ends <= _MOST_ENDS and all(len(word) == 1 for word in rules.stop_words)


class PlainSequences:
    """By slot. What a step changes stands in one array, a row for each slot, since few operations take time, whatever
    the number of sequences."""

    def __init__(self) -> None:
        self.rules: dict[int, SequenceRules] = {}
        self._here: Bools = np.zeros(0, np.bool_)
        self._state: Int32 = np.zeros((0, _COLUMNS), np.int32)
        self._ends: Int32 = np.zeros((0, _MOST_ENDS), np.int32)
        self._num_ends = 0  # of all sequences so far: mostly there are none

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """See Session.start, for rules that are plain."""
        if slot >= len(self._here):
            self._grow(2 * slot + 1)
        ends = [*rules.end_ids, *(word[0] for word in rules.stop_words)]
        last = int(tokens[-1]) if len(tokens) else _NO_TOKEN
        self.rules[slot], self._here[slot] = rules, True
        self._state[slot] = last, len(tokens) - num_prompt, 0, Ending.NONE, rules.max_tokens, num_prompt
        self._num_ends += len(ends)
        self._ends[slot] = ends + [_NO_TOKEN] * (_MOST_ENDS - len(ends))

    def end(self, slot: int) -> None:
        """See Session.end. What a step that is under way draws for it may still be recorded."""
        if self.rules.pop(slot, None) is not None:
            self._here[slot] = False

    def has(self, slots: Int32) -> Bools:
        """Which of the slots hold a sequence in here."""
        size = len(self._here)
        if not len(slots):
            return np.zeros(0, np.bool_)
        if slots.min() >= 0 and slots.max() < size:
            here: Bools = self._here[slots]
            return here
        inside = (slots >= 0) & (slots < size)
        found: Bools = np.zeros(len(slots), np.bool_)
        found[inside] = self._here[slots[inside]]
        return found

    def next_inputs(self, slots: Int32) -> Int32:
        """The last token of each; -1 - slot for one that is not known yet."""
        state = self._state[slots]
        found: Int32 = np.where(state[:, _SUBMITTED] > 0, -1 - slots, state[:, _LAST])
        return found

    def num_prompt(self, slots: Int32) -> Int32:
        """Tokens of each that were not generated."""
        found: Int32 = self._state[slots, _PROMPT]
        return found

    def counters(self, slots: Int32) -> Int32:
        """The number of each sequence's next draw. Raises RequestError where a sequence cannot draw."""
        state = self._state[slots]
        if state[:, _ENDING].any():
            raise RequestError("a sequence that has ended draws no more", got=Ending(int(state[:, _ENDING].max())).name)
        counters: Int32 = state[:, _GENERATED] + state[:, _SUBMITTED]
        beyond = counters >= state[:, _MOST]
        if beyond.any() and (beyond & (state[:, _SUBMITTED] > 0)).any():
            raise RequestError("this sequence's next draw depends on a token that is not known yet")
        return counters

    def submit(self, slots: Int32) -> None:
        """Note that a draw of each is under way."""
        self._state[slots, _SUBMITTED] += 1

    def record(self, slots: Int32, ids: Int32, log_probs: Float32, *, submitted: bool) -> Int32:
        """Add what was drawn; the Ending of each. A submitted draw of a sequence that has ended counts for nothing."""
        state = self._state[slots]
        if submitted:
            state[:, _SUBMITTED] -= 1
        before = state[:, _ENDING]
        if not len(ids) or before.any() or ids.min() < 0 or not math.isfinite(log_probs.sum()):
            return self._record_some(slots, state, ids, log_probs)
        state[:, _LAST] = ids
        state[:, _GENERATED] += 1
        long = state[:, _GENERATED] >= state[:, _MOST]
        if long.any():
            state[long, _ENDING] = Ending.LENGTH
        if self._num_ends:
            state[(self._ends[slots] == ids[:, None]).any(axis=1), _ENDING] = Ending.STOP
        self._state[slots] = state
        ending: Int32 = state[:, _ENDING]
        return ending

    def _record_some(self, slots: Int32, state: Int32, ids: Int32, log_probs: Float32) -> Int32:
        """`record`, where some have ended before, or have no token."""
        going = state[:, _ENDING] == Ending.NONE
        drawn = (ids >= 0) & np.isfinite(log_probs)
        state[going & ~drawn, _ENDING] = Ending.FAILED
        self._state[slots] = state
        adds = going & drawn
        if adds.any():
            self.record(slots[adds], ids[adds], log_probs[adds], submitted=False)
        ending: Int32 = self._state[slots, _ENDING]
        return ending

    def _grow(self, size: int) -> None:
        more = size - len(self._here)
        self._here = np.pad(self._here, (0, more))
        self._state, self._ends = (np.pad(each, ((0, more), (0, 0))) for each in (self._state, self._ends))
