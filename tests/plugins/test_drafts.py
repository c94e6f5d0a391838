"""Draws from the rows of drafts: what steps of one token each draw, on `ref` and native sessions alike."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import NO_LOG_PROB, NOT_DRAWN, Ending, SequenceRules, Session, StepBatch
from tests.plugins.cpu.one_step import batch_of
from tests.plugins.ops.draws import random_rules
from tests.plugins.test_guided_sequences import Toy
from tests.plugins.test_sequences import Asked, run_alone
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model
from tests.spanning import often

PROMPT = [7, 8, 9]
VARIED: dict[str, Any] = {"temperature": 2.0, "seed": 1}


@pytest.fixture(scope="module", params=["ref", pytest.param("cpu", marks=pytest.mark.native)])
def model(request: pytest.FixtureRequest) -> TinyModel:
    target = find_target(request.param)
    return make_model(None if target.name == "ref" else target)


@pytest.fixture
def session(model: TinyModel, request: pytest.FixtureRequest) -> Iterator[Session]:
    target = find_target(request.node.callspec.params["model"])
    session = target.open_session(model.plan, model.weights, SessionOptions(num_blocks=(40,), threads=2))
    yield session
    session.close()


def drafted_step(asked: list[Asked], drafts: list[list[int]]) -> StepBatch:
    """All pending tokens of each, and drafts behind them; every sequence draws."""
    ids: list[int] = []
    rows: list[int] = []
    counts = []
    for each, own in zip(asked, drafts, strict=True):
        ids += [*(each.prompt + each.tokens)[each.computed :], *own]
        counts.append(len(each.prompt) + len(each.tokens) - each.computed + len(own))
        rows += range(len(ids) - 1 - len(own), len(ids))
    return StepBatch(
        ids=np.array(ids, np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        past_lengths=np.array([each.computed for each in asked], np.int32),
        block_tables=np.array([[each.blocks for each in asked]], np.int32),
        logit_rows=np.array(rows, np.int32),
        slots=np.array([each.slot for each in asked], np.int32),
        draws=np.arange(len(rows), dtype=np.int32),
    )


def advance(session: Session, asked: list[Asked], drafts: list[list[int]]) -> list[int]:
    """One step; how many tokens each got."""
    result = session.run(drafted_step(asked, drafts))
    place = top = 0
    got = []
    for each, own in zip(asked, drafts, strict=True):
        before = len(each.tokens)
        each.computed = len(each.prompt) + before
        for number in range(len(own) + 1):
            if result.ids[0, place] == NOT_DRAWN:
                assert number > 0
                assert result.log_probs[0, place] == NO_LOG_PROB
                assert result.ends[place] == Ending.NONE
                assert result.token_ranks is None or result.token_ranks[0, place] == 0
            else:
                assert len(each.tokens) == before + number, "nothing counts behind what does not"
                each.take(result, place, top)
            place, top = place + 1, top + (each.rules.top or 0)
        got.append(len(each.tokens) - before)
        each.computed += max(got[-1] - 1, 0)
    return got


def drafts_for(rng: np.random.Generator, each: Asked, expected: Asked) -> list[int]:
    """Some of the tokens that will come, with or without a wrong one, and some behind the end."""
    known, most = len(each.tokens), each.rules.max_tokens - len(each.tokens) - 1
    if each.rules.guided or most < 1:
        return []
    behind: list[int] = rng.integers(0, VOCAB, 2).tolist()
    drafts = expected.tokens[known : known + int(rng.integers(0, 6))] + behind
    if rng.random() < 0.3:
        drafts[int(rng.integers(len(drafts)))] = int(rng.integers(VOCAB))
    return drafts[: int(rng.integers(0, most + 1))]


@pytest.mark.daily(1)
@pytest.mark.parametrize("seed", often(range(8), range(4)))
def test_tokens_are_those_of_the_specification_alone(session: Session, seed: int) -> None:
    """With all rules, and with other sequences in the same steps."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(40).tolist()
    asked = [
        Asked(
            prompt=rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(),
            rules=dataclasses.replace(random_rules(rng, VOCAB), max_tokens=int(rng.integers(1, 30))),
            blocks=[order.pop() for _ in range(4)],
        )
        for _ in range(7)
    ]
    alone = [dataclasses.replace(each, tokens=[], brought=[]) for each in asked]
    for each in alone:
        run_alone(session, each)
    for slot, each in enumerate(asked):
        each.slot = slot
        session.start(slot, each.rules, np.array(each.prompt, np.int32), len(each.prompt))
    several = 0
    while left := [place for place, each in enumerate(asked) if each.ending is Ending.NONE]:
        places = rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist()
        drafts = [drafts_for(rng, asked[place], alone[place]) for place in places]
        several += sum(count > 1 for count in advance(session, [asked[place] for place in places], drafts))
    assert several > 0
    for got, expected in zip(asked, alone, strict=True):
        assert got.tokens == expected.tokens
        assert got.ending is expected.ending
        for mine, theirs in zip(got.brought, expected.brought, strict=True):
            assert mine[0] == theirs[0]
            assert mine[1] == pytest.approx(theirs[1], abs=1e-4, nan_ok=True)
            assert mine[2:] == theirs[2:]


@pytest.mark.parametrize("seed", range(12))
def test_a_grammar_limits_every_draw_and_hears_of_tokens_alone(session: Session, seed: int) -> None:
    """Whatever the drafts are: allowed, not allowed, or behind its end."""
    rng = np.random.default_rng(seed)
    places = [rng.choice(VOCAB, rng.integers(1, 6), replace=False).tolist() for _ in range(12)]
    rules = SequenceRules(temperature=2.0, seed=seed, end_ids=(3,), min_tokens=int(rng.integers(0, 20)))
    expected = begin(session, dataclasses.replace(rules, grammar=Toy(*places)))
    while expected.ending is Ending.NONE:
        advance(session, [expected], [[]])
    assert len(expected.tokens) <= len(places)
    grammar = Toy(*places)
    each = begin(session, dataclasses.replace(rules, grammar=grammar))
    longest = 0
    while each.ending is Ending.NONE:
        coming = expected.tokens[len(each.tokens) :]
        drafts = [*coming, *rng.integers(0, VOCAB, 3).tolist()][: rng.integers(0, 7)]
        if drafts and rng.random() < 0.5:  # another one, allowed or not
            place = int(rng.integers(len(drafts)))
            at = len(each.tokens) + place
            allowed = places[at] if at < len(places) else [0]
            drafts[place] = int(rng.choice(allowed)) if rng.random() < 0.5 else int(rng.integers(VOCAB))
        longest = max(longest, *advance(session, [each], [drafts]))
        assert grammar.taken == each.tokens
    assert each.brought == expected.brought
    assert each.ending is expected.ending
    assert longest > 1


def begin(session: Session, rules: SequenceRules, slot: int = 0) -> Asked:
    each = Asked(prompt=list(PROMPT), rules=rules, blocks=[4 * slot + number for number in range(4)], slot=slot)
    session.start(slot, rules, np.array(PROMPT, np.int32), len(PROMPT))
    return each


def said_alone(session: Session, count: int) -> list[int]:
    """What the model says behind the prompt."""
    each = begin(session, SequenceRules(max_tokens=count, **VARIED))
    while each.ending is Ending.NONE:
        advance(session, [each], [[]])
    return each.tokens


def test_the_end_of_a_sequence_is_the_end_of_its_drafts(session: Session) -> None:
    expected = said_alone(session, 9)
    assert len(set(expected[:6])) == 6
    for rules, count in (
        (SequenceRules(end_ids=(expected[4],)), 5),
        (SequenceRules(stop_words=((expected[3], expected[4]),)), 5),
        (SequenceRules(max_tokens=8), 8),
    ):
        each = begin(session, dataclasses.replace(rules, **VARIED))
        advance(session, [each], [[]])
        advance(session, [each], [expected[1:7]])
        assert each.tokens == expected[:count]
        assert each.ending is (Ending.LENGTH if rules.max_tokens == 8 else Ending.STOP)


def test_a_draw_that_fails_behind_a_draft_fails_when_it_is_the_first(session: Session) -> None:
    expected = said_alone(session, 3)
    banned = tuple((expected[0], expected[1], token) for token in range(VOCAB))
    each = begin(session, SequenceRules(bad_words=banned, **VARIED))
    endings = []
    for drafts, count in ((expected[:2], 2), ([1], 0)):
        assert advance(session, [each], [drafts]) == [count]
        endings.append(each.ending)
    assert endings == [Ending.NONE, Ending.FAILED]


def test_a_sequence_starts_again_behind_a_step_that_was_refused(session: Session) -> None:
    expected = said_alone(session, 6)
    each = begin(session, SequenceRules(**VARIED))
    batch = drafted_step([each], [expected[:4]])
    with pytest.raises(RequestError):
        session.run(dataclasses.replace(batch, draws=np.array([0, 1, 2, 3, 4, 0], np.int32)))
    each = begin(session, SequenceRules(**VARIED))
    assert advance(session, [each], [expected[:4]]) == [5]
    assert each.tokens == expected[:5]


@pytest.mark.parametrize(
    ("draws", "words"),
    [
        ([0, 1], "last tokens"),
        ([2, 1], "neighbours|last tokens"),
        ([0, 2], "neighbours|last tokens"),
        ([0, 3, 1], "neighbours"),
        ([1, 2, 9], "row of a draw is 9|out of bounds"),
    ],
)
def test_draws_are_from_the_last_tokens_in_order(session: Session, draws: list[int], words: str) -> None:
    for slot in (0, 1):
        begin(session, SequenceRules(), slot)
    parts = [(0, 3), (0, 1)]
    batch = batch_of(parts, [[0], [4]], [0, 1, 2, 3], draws=draws, ids=np.array([7, 8, 9, 7], np.int32))
    with pytest.raises((RequestError, IndexError), match=words):
        session.run(batch)


def test_drafts_beyond_the_rules_of_a_sequence_are_refused(session: Session) -> None:
    each = begin(session, SequenceRules(max_tokens=3))
    with pytest.raises(RequestError, match="more drafts than tokens"):
        advance(session, [each], [[1, 2, 3]])
    each = begin(session, SequenceRules(reasoning_end=(5,)))
    with pytest.raises(RequestError, match="draws from one row"):
        advance(session, [each], [[1]])
