"""Requests and the slots of a session: who has one, and who begins again."""

import dataclasses

import numpy as np
import pytest

from ingot.plan import Limits
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.logits_rules import Rules
from ingot.runtime.request import Request
from ingot.runtime.sequences import Sequences, sequence_rules
from ingot.step_io import Int32, SequenceRules, StepBatch
from tests.runtime.fake_session import FakeSession, continued
from tests.runtime.tiny_engine import make_loop

LIMITS = Limits(max_batch_size=2, max_input_len=40, max_seq_len=48, max_num_tokens=32, max_logit_rows=8)


class Told(FakeSession):
    """Notes who starts and ends: (slot, tokens), slot."""

    def __init__(self, num_blocks: int = 100) -> None:
        super().__init__(num_blocks, 4, LIMITS)
        self.told: list[tuple[int, list[int]] | int] = []

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        super().start(slot, rules, tokens, num_prompt)
        self.told.append((slot, tokens.tolist()))

    def end(self, slot: int) -> None:
        super().end(slot)
        self.told.append(slot)


def request_of(*prompt: int, count: int = 9) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count)


def test_a_preempted_request_keeps_its_slot_until_somebody_wants_it() -> None:
    blocks, session = BlockManager((20,), 4), Told()
    sequences, (first, second, third) = Sequences(session, 2), (request_of(n) for n in range(3))
    for request in (first, second, third):
        assert blocks.reserve([(request.blocks, 4)])
    sequences.start([first, second])
    first.append(7, 0.0)
    blocks.release(first.blocks)
    sequences.start([second])
    assert session.told == [(1, [0]), (0, [1])]
    sequences.start([second, third])
    assert session.told[2:] == [1, (1, [2])]
    assert first.slot is None
    sequences.end([second, second])
    sequences.start([first])
    assert session.told[4:] == [0, (0, [0, 7])]


def test_whoever_was_in_a_step_that_failed_begins_again() -> None:
    session, failing = Told(), True
    loop = make_loop(session, LIMITS, 4)[0]
    requests = [request_of(1, 2), request_of(3, 4)]
    loop.add(requests)
    loop.step()

    def fail_once(batch: StepBatch) -> None:
        nonlocal failing
        if failing:
            failing = False
            raise ValueError("the kernel fell over")

    session.before_step = fail_once
    session.told.clear()
    loop.step()
    slots = [request.slot for request in requests]
    assert sorted(told for told in session.told if isinstance(told, int)) == sorted(slots)  # type: ignore[type-var]
    again = [told[1] for told in session.told if not isinstance(told, int)]
    assert again == [request.tokens[:3].tolist() for request in requests]
    loop.drain()
    for request in requests:
        assert request.generated().tolist() == continued(request.tokens[:2].tolist(), 9)
        assert request.slot is None


def test_an_end_frees_the_slot() -> None:
    session = Told()
    loop = make_loop(session, LIMITS, 4)[0]
    requests = [request_of(n, count=2 + n) for n in range(1, 7)]
    loop.add(requests)
    loop.drain()
    assert [request.num_generated for request in requests] == [3, 4, 5, 6, 7, 8]
    ends = [told for told in session.told if isinstance(told, int)]
    assert len(ends) == len(session.told) - len(ends) == 6
    assert set(ends) == {0, 1}


def test_everything_that_a_request_asks_for_is_told() -> None:
    """Each field once, with a value that is not the usual one."""
    rules = Rules(
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias=((4, 0.5),),
        bad_words=((1, 2),),
        min_tokens=3,
    )
    request = Request(
        np.array([1], np.int32),
        max_new_tokens=9,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        seed=11,
        rules=rules,
        end_ids=frozenset({8, 2}),
        stop_words=[(5, 6)],
        want_log_probs=False,
    )
    told = sequence_rules(request)
    usual = SequenceRules()
    same = [f.name for f in dataclasses.fields(told) if getattr(told, f.name) == getattr(usual, f.name)]
    assert same == [
        "top",
        "reasoning_end",
        "reasoning_begin",
        "reasoning_budget",
        "grammar",
    ]  # no chat, and no structured output
    assert (told.end_ids, told.max_tokens, told.stop_words) == ((2, 8), 9, ((5, 6),))
    wanting = Request(np.array([1], np.int32), max_new_tokens=9, logprobs=2, want_log_probs=False)
    assert (sequence_rules(wanting).top, sequence_rules(wanting).log_prob) == (2, True)


def test_a_sequence_cannot_be_forgotten_for_one_that_runs() -> None:
    blocks, sequences = BlockManager((20,), 4), Sequences(Told(), 1)
    first, second = request_of(1), request_of(2)
    assert blocks.reserve([(first.blocks, 4)])
    sequences.start([first])
    with pytest.raises(StopIteration):
        sequences.start([second])
