"""What a session holds of a sequence: bans and ends follow from its tokens, on `ref` and native sessions alike."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.plugins.registry import find_target
from ingot.plugins.sequences import Sequences
from ingot.plugins.target import SessionOptions
from ingot.step_io import LAST_DRAWN, Ahead, Ending, Float32, SequenceRules, Session, StepBatch, StepResult
from tests.plugins.ops.draws import random_rules
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model
from tests.spanning import often

PROMPT = [7, 8]


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


def start(session: Session, rules: SequenceRules, generated: list[int], slot: int = 0) -> None:
    session.start(slot, rules, np.array(PROMPT + generated, np.int32), len(PROMPT))


def likely(*tokens: int) -> Float32:
    """Logits whose best tokens are these, in order."""
    row = np.zeros((1, VOCAB), np.float32)
    for place, token in enumerate(tokens):
        row[0, token] = 9 - place
    return row


def drawn(session: Session, row: Float32, slot: int = 0) -> tuple[int, Ending]:
    result = session.draw(np.array([slot], np.int32), row, row)
    return int(result.ids[0, 0]), Ending(int(result.ends[0]))


@pytest.mark.parametrize(("generated", "expected"), [([5], 6), ([4, 5], 7), ([1, 4, 5], 7), ([4], 6), ([], 6)])
def test_a_bad_word_is_banned_when_it_has_begun(session: Session, generated: list[int], expected: int) -> None:
    start(session, SequenceRules(bad_words=((4, 5, 6), (3,))), generated)
    assert drawn(session, likely(3, 6, 7))[0] == expected


@pytest.mark.parametrize(
    ("generated", "ending"),
    [([4, 5], Ending.STOP), ([1, 4, 5], Ending.STOP), ([5], Ending.NONE), ([4, 1], Ending.NONE)],
)
def test_a_stop_word_may_have_begun_before(session: Session, generated: list[int], ending: Ending) -> None:
    start(session, SequenceRules(stop_words=((4, 5, 6),)), generated)
    assert drawn(session, likely(6)) == (6, ending)


def test_words_do_not_begin_in_the_prompt(session: Session) -> None:
    start(session, SequenceRules(stop_words=((8, 6),), bad_words=((8, 5),)), [])
    assert drawn(session, likely(5)) == (5, Ending.NONE)
    start(session, SequenceRules(stop_words=((8, 6),)), [])
    assert drawn(session, likely(6)) == (6, Ending.NONE)


def test_end_tokens_are_banned_for_the_least_length(session: Session) -> None:
    rules = SequenceRules(end_ids=(5, 6), min_tokens=2, stop_words=((7,),))
    start(session, rules, [])
    assert drawn(session, likely(5, 6, 7, 9)) == (7, Ending.NONE), "a stop word does not end it yet"
    assert drawn(session, likely(5, 6, 7)) == (7, Ending.STOP)
    start(session, rules, [1, 2])
    assert drawn(session, likely(5)) == (5, Ending.STOP)


def test_a_sequence_ends_at_its_length_and_draws_no_more(session: Session) -> None:
    start(session, SequenceRules(max_tokens=3, end_ids=(6,)), [1])
    assert drawn(session, likely(5)) == (5, Ending.NONE)
    assert drawn(session, likely(5)) == (5, Ending.LENGTH)
    with pytest.raises(RequestError, match="draws no more"):
        drawn(session, likely(5))
    start(session, SequenceRules(max_tokens=3, end_ids=(6,)), [1, 2])
    assert drawn(session, likely(6)) == (6, Ending.STOP), "an end token at the last place is an end"
    with pytest.raises(RequestError, match=r"as many tokens|cannot start"):
        start(session, SequenceRules(max_tokens=3), [1, 2, 3])


def test_a_draw_that_fails_adds_nothing(session: Session) -> None:
    start(session, SequenceRules(logit_bias=tuple((token, -np.inf) for token in range(VOCAB))), [1])
    assert drawn(session, likely(5)) == (-1, Ending.FAILED)
    start(session, SequenceRules(), [1])
    assert drawn(session, likely(5) * np.nan)[1] is Ending.FAILED


def test_slots_are_forgotten_and_taken_again(session: Session) -> None:
    with pytest.raises(RequestError, match="started"):
        drawn(session, likely(5), slot=1)
    start(session, SequenceRules(), [], slot=1)
    start(session, SequenceRules(bad_words=((5,),)), [], slot=1)
    assert drawn(session, likely(5, 6), slot=1)[0] == 6
    session.end(1)
    session.end(1)
    with pytest.raises(RequestError, match="started"):
        drawn(session, likely(5), slot=1)


def test_probabilities_of_processed_logits_are_those_of_the_raw_ones(session: Session) -> None:
    raw, processed = likely(1, 2, 3), likely(3)
    start(session, SequenceRules(top=2), [])
    result = session.draw(np.zeros(1, np.int32), processed, raw)
    assert result.ids.tolist() == [[3]]
    assert result.token_ranks is not None
    assert result.token_ranks.tolist() == [[3]]
    assert result.top_ids is not None
    assert result.top_ids.tolist() == [[1, 2]]
    wide = raw[0].astype(np.float64)
    assert result.log_probs[0, 0] == pytest.approx(wide[3] - np.log(np.exp(wide).sum()), rel=1e-5)


@dataclasses.dataclass(kw_only=True)
class Asked:
    """A sequence and what came of it: (token, log probability, rank, most likely tokens) of each draw."""

    prompt: list[int]
    rules: SequenceRules
    blocks: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    brought: list[tuple[int, float, int, list[int]]] = dataclasses.field(default_factory=list)
    ending: Ending = Ending.NONE
    slot: int | None = None
    computed: int = 0

    def take(self, result: StepResult, place: int, top: int) -> None:
        tops = slice(top, top + (self.rules.top or 0))
        for step in range(len(result.ids)):
            rank = 0 if result.token_ranks is None or self.rules.top is None else int(result.token_ranks[step, place])
            likely = [] if result.top_ids is None else result.top_ids[step, tops].tolist()
            token, log_prob = int(result.ids[step, place]), float(result.log_probs[step, place])
            self.brought.append((token, log_prob, rank, likely))
            if token >= 0:
                self.tokens.append(token)
        self.ending = Ending(int(result.ends[place]))


def step_of(asked: list[Asked], chunks: list[int]) -> StepBatch:
    ids: list[int] = []
    for each, count in zip(asked, chunks, strict=True):
        known = each.prompt + each.tokens
        decodes = count == 1 and each.tokens and each.computed == len(known) - 1
        ids += [LAST_DRAWN] if decodes else known[each.computed : each.computed + count]
    starts = np.cumsum([0, *chunks]).astype(np.int32)
    ends = [count == len(a.prompt) + len(a.tokens) - a.computed for a, count in zip(asked, chunks, strict=True)]
    rows = starts[1:][ends] - np.int32(1)
    return StepBatch(
        ids=np.array(ids, np.int32),
        query_starts=starts,
        past_lengths=np.array([each.computed for each in asked], np.int32),
        block_tables=np.array([[each.blocks for each in asked]], np.int32),
        logit_rows=rows,
        slots=np.array([each.slot for each in asked], np.int32),
        draws=np.arange(len(rows), dtype=np.int32),
    )


def run_alone(logits_of: Session, each: Asked) -> None:
    """By the numpy specification, on the logits of a session that computes the whole sequence for every token."""
    sequences = Sequences()
    sequences.start(0, each.rules, np.array(each.prompt, np.int32), len(each.prompt))
    while each.ending is Ending.NONE:
        each.slot, each.computed = -1, 0
        known = each.prompt + each.tokens
        batch = step_of([each], [len(known)])
        batch = dataclasses.replace(batch, ids=np.array(known, np.int32), draws=batch.draws[:0], want_logits=True)
        logits = logits_of.run(batch).logits
        assert logits is not None
        each.take(sequences.draw(np.zeros(1, np.int32), logits, logits), 0, 0)


class Schedule:
    """Some sequences of one session, in steps of any company and length."""

    def __init__(self, rng: np.random.Generator, session: Session, slots: int, asked: list[Asked]) -> None:
        self._rng, self._session, self._asked = rng, session, asked
        self._slots, self._free = slots, list(range(slots))

    def run(self) -> None:
        while left := [each for each in self._asked if each.ending is Ending.NONE]:
            self._step(left)

    def _step(self, left: list[Asked]) -> None:
        rng = self._rng
        for each in left:
            if rng.random() < 0.1:  # preempted: its tokens are computed again
                self._end(each)
                each.computed = 0
        places = rng.permutation(len(left))[: rng.integers(1, min(self._slots, len(left)) + 1)]
        company = [left[place] for place in places]
        for each in left:
            if each not in company:
                self._end(each)  # its keys and values stay
        for each in company:
            self._start(each)
        pending = [len(each.prompt) + len(each.tokens) - each.computed for each in company]
        chunks = [int(rng.integers(1, count + 1)) if rng.random() < 0.3 else count for count in pending]
        ahead = None
        if all(count == 1 for count in pending) and self._session.most_steps > 1 and rng.random() < 0.7:
            ahead = Ahead(most_steps=int(rng.integers(1, 9)), seconds=60, stop=np.zeros(1, np.int32))
        result = self._session.run(step_of(company, chunks), ahead)
        place = top = 0
        for each, count, rest in zip(company, chunks, pending, strict=True):
            if count == rest:
                each.take(result, place, top)
                place, top = place + 1, top + (each.rules.top or 0)
            each.computed += count + len(result.ids) - 1
            if each.ending is not Ending.NONE:
                self._end(each)

    def _start(self, each: Asked) -> None:
        if each.slot is None:
            each.slot = self._free.pop(int(self._rng.integers(len(self._free))))
            known = np.array(each.prompt + each.tokens, np.int32)
            self._session.start(each.slot, each.rules, known, len(each.prompt))

    def _end(self, each: Asked) -> None:
        if each.slot is not None:
            self._session.end(each.slot)
            self._free.append(each.slot)
            each.slot = None


@pytest.mark.daily(1)
@pytest.mark.parametrize("seed", often(range(6), range(3)))
def test_random_schedules_give_what_the_specification_gives_alone(
    session: Session, model: TinyModel, seed: int
) -> None:
    """Chunks, companies, slots, preemptions and restarts at random; several steps at a time where a session can."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(40).tolist()
    asked = [
        Asked(
            prompt=rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(),
            rules=random_rules(rng, VOCAB),
            blocks=[order.pop() for _ in range(4)],
        )
        for _ in range(9)
    ]
    alone = [dataclasses.replace(each, tokens=[], brought=[]) for each in asked]
    for each in alone:
        run_alone(session, each)
    Schedule(rng, session, model.plan.limits.max_batch_size, asked).run()
    for got, expected in zip(asked, alone, strict=True):
        assert got.tokens == expected.tokens
        assert got.ending is expected.ending
        for mine, theirs in zip(got.brought, expected.brought, strict=True):
            assert mine[0] == theirs[0]
            assert mine[1] == pytest.approx(theirs[1], abs=1e-4, nan_ok=True)
            assert mine[2:] == theirs[2:]
