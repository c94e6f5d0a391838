"""Draws that a grammar limits, on `ref` and native sessions alike. The grammar is a toy with native functions."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import Ending, SequenceRules, Session, UInt32
from tests.plugins.test_sequences import PROMPT, drawn, likely, start
from tests.runtime.tiny_plan import VOCAB, make_model

_WORDS = (VOCAB + 31) // 32
_P, _I = ctypes.c_void_p, ctypes.c_int32
_TYPES: tuple[Any, ...] = (
    ctypes.CFUNCTYPE(_I, _P),
    ctypes.CFUNCTYPE(_I, _P, ctypes.c_uint32),
    ctypes.CFUNCTYPE(_I, _P, ctypes.POINTER(ctypes.c_uint32), ctypes.c_size_t),
    ctypes.CFUNCTYPE(ctypes.c_bool, _P),
    ctypes.CFUNCTYPE(_I, _P, ctypes.c_size_t),
)


class Toy:
    """Allows at each place the tokens listed for it; no list fails."""

    def __init__(self, *places: Sequence[int], words: int = _WORDS) -> None:
        self.places, self.taken, self._words = places, list[int](), words
        calls: tuple[Any, ...] = (
            lambda state: 0 if self.reset() else -1,
            lambda state, token: self._consume(token),
            self._fill,
            lambda state: self._stopped,
            lambda state, count: 0 if self.rollback(count) else -1,
        )
        self._functions = [kind(call) for kind, call in zip(_TYPES, calls, strict=True)]
        reset, consume, fill, stopped, rollback = (ctypes.cast(each, _P).value or 0 for each in self._functions)
        self.native = (1, reset, consume, fill, stopped, rollback, words)

    @property
    def _stopped(self) -> bool:
        return len(self.taken) == len(self.places)

    def reset(self) -> bool:
        self.taken.clear()
        return True

    def allowed(self) -> UInt32:
        mask = np.zeros(self._words, np.uint32)
        for token in self.places[len(self.taken)]:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def consume(self, token: int) -> bool:
        self.taken.append(token)
        return self._stopped

    def rollback(self, count: int) -> bool:
        assert 0 < count <= len(self.taken)
        del self.taken[-count:]
        return True

    def _consume(self, token: int) -> int:
        self.consume(token)
        return 0

    def _fill(self, state: Any, to: Any, size: int) -> int:
        mask = self.allowed()
        assert size == mask.nbytes
        for place, word in enumerate(mask.tolist()):
            to[place] = word
        return 0 if mask.any() else -1


@pytest.fixture(params=["ref", pytest.param("cpu", marks=pytest.mark.native)])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    target = find_target(request.param)
    model = make_model(None if target.name == "ref" else target)
    session = target.open_session(model.plan, model.weights, SessionOptions(num_blocks=(40,), threads=2))
    yield session
    session.close()


def test_only_allowed_tokens_are_drawn_and_the_last_ends_it(session: Session) -> None:
    grammar = Toy([4, 9], [5, 6], [7])
    start(session, SequenceRules(grammar=grammar, min_tokens=50, end_ids=(1,)), [])
    best = likely(3, 9, 5, 4, 7)
    assert [drawn(session, best) for _ in range(3)] == [(9, Ending.NONE), (5, Ending.NONE), (7, Ending.STOP)]
    assert grammar.taken == [9, 5, 7]


def test_it_goes_on_behind_the_tokens_that_it_begins_with(session: Session) -> None:
    grammar = Toy([4], [5], [6], [7])
    grammar.taken = [1, 1, 1]  # whatever it has seen
    start(session, SequenceRules(grammar=grammar), [4, 5])
    assert drawn(session, likely(3, 7, 6)) == (6, Ending.NONE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_act_on_what_is_allowed(session: Session, temperature: float) -> None:
    rules = SequenceRules(grammar=Toy([4, 5], [6]), bad_words=((4,),), temperature=temperature, logit_bias=((8, 99.0),))
    start(session, rules, [])
    assert drawn(session, likely(4, 8, 5))[0] == 5


def test_no_token_left_fails(session: Session) -> None:
    start(session, SequenceRules(grammar=Toy([], [])), [])
    assert drawn(session, likely(4)) == (-1, Ending.FAILED)


def test_the_grammar_waits_for_the_end_of_the_reasoning(session: Session) -> None:
    grammar = Toy([4], [5])
    start(session, SequenceRules(grammar=grammar, reasoning_end=(8, 9), end_ids=(1,)), [])
    assert drawn(session, likely(1, 3))[0] == 3  # an end here would leave the grammar out
    assert [drawn(session, likely(each))[0] for each in (8, 9)] == [8, 9]
    assert grammar.taken == []
    assert [drawn(session, likely(3, 5, 4)) for _ in range(2)] == [(4, Ending.NONE), (5, Ending.STOP)]


@pytest.mark.parametrize(("generated", "forced"), [([3, 3], [8, 9]), ([3, 8], [9]), ([3, 8, 9], [])])
def test_the_end_of_the_reasoning_is_forced_at_its_budget(
    session: Session, generated: list[int], forced: list[int]
) -> None:
    start(session, SequenceRules(reasoning_end=(8, 9), reasoning_budget=2, min_tokens=9, end_ids=(8,)), generated)
    assert [drawn(session, likely(3))[0] for _ in range(3)] == [*forced, 3, 3, 3][:3]


@pytest.mark.parametrize("generated", [[], [6]])
def test_a_sequence_that_may_reason_decides_by_its_first_token(session: Session, generated: list[int]) -> None:
    grammar = Toy([4], [5])
    rules = SequenceRules(grammar=grammar, reasoning_begin=6, reasoning_end=(8,), reasoning_budget=3, end_ids=(1,))
    start(session, rules, generated)
    if not generated:
        assert drawn(session, likely(3, 6, 4))[0] == 6, "the grammar's tokens, and the one that begins reasoning"
    assert [drawn(session, likely(3, 4))[0] for _ in range(3)] == [3, 3, 8]
    assert [drawn(session, likely(3, 5, 4)) for _ in range(2)] == [(4, Ending.NONE), (5, Ending.STOP)]


@pytest.mark.parametrize("generated", [[], [4]])
def test_or_does_not_reason(session: Session, generated: list[int]) -> None:
    rules = SequenceRules(
        grammar=Toy([4], [5]), reasoning_begin=6, reasoning_end=(8,), reasoning_budget=0, end_ids=(5,)
    )
    start(session, rules, generated)
    if not generated:
        assert drawn(session, likely(3, 4, 6))[0] == 4
    assert drawn(session, likely(6, 3, 5)) == (5, Ending.STOP)


def test_a_grammar_that_has_failed_begins_nothing(session: Session) -> None:
    grammar = Toy([4])
    grammar.reset = lambda: False  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="has failed before"):
        session.start(0, SequenceRules(grammar=grammar), np.array(PROMPT, np.int32), len(PROMPT))
