"""Several steps in one crossing of draws that depend on what was drawn before: the tokens and bits of single steps."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.plugins.cpu.session import CpuSession
from ingot.plugins.registry import find_target
from ingot.runtime import repetition, step_loop
from ingot.step_io import Course, Int32, ProbRows, Repeat, RepeatProbs, SampleRows, StepBatch
from tests.plugins.ops.draws import Rule, make_rules
from tests.runtime.decode_by_run import decode_by_run, joined
from tests.runtime.repeating import steps_of_calls
from tests.runtime.tiny_engine import make_runner, open_session, poisoned_runner
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model

pytestmark = pytest.mark.native

MOST = 30
PROMPTS = 6


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return make_model(find_target("cpu"))


def _words(rng: np.random.Generator, sequences: int, shortest: int) -> tuple[Int32, Int32]:
    def some() -> list[int]:
        lengths = rng.integers(shortest, 4, rng.choice([0, 3, 40]))
        return [token for n in lengths for token in (*rng.integers(0, VOCAB, n).tolist(), -1)]

    return joined([some() for _ in range(sequences)])


def _course(rng: np.random.Generator, lasting: list[int]) -> Course:
    sequences = len(lasting)
    bad_starts, bad = _words(rng, sequences, 2)
    stop_starts, stop = _words(rng, sequences, 3)
    tail_starts, tails = joined([rng.integers(0, VOCAB, rng.integers(0, 3)).tolist() for _ in range(sequences)])
    return Course(
        num_lasting=np.array(lasting, np.int32),
        min_steps=rng.choice([0, 0, 8], sequences).astype(np.int32),
        tails=tails,
        tail_starts=tail_starts,
        bad_words=bad,
        bad_word_starts=bad_starts,
        stop_words=stop,
        stop_word_starts=stop_starts,
    )


def _rule(rng: np.random.Generator) -> Rule:
    biases = {int(token): float(rng.choice([-np.inf, 1.5])) for token in rng.integers(0, VOCAB, rng.integers(0, 4))}
    prompt = rng.integers(0, VOCAB, 5).tolist() if rng.random() < 0.6 else []
    output = rng.integers(0, VOCAB, rng.integers(0, 4)).tolist() if prompt else []
    penalties = (float(rng.choice([1, 1.4])), float(rng.choice([0, 0.6])), float(rng.choice([0, 0.7])))
    return biases, prompt, output, penalties if prompt else (1.0, 0.0, 0.0), float(rng.choice([0, 0.05]))


def _batch(rng: np.random.Generator, session: CpuSession, sequences: int) -> tuple[StepBatch, list[int]]:
    """A first decode step behind random prompts, and how many biases of each draw last."""
    width = 4
    tables = rng.permutation(sequences * width).astype(np.int32).reshape(1, sequences, width)
    one_each = np.arange(sequences + 1, dtype=np.int32)
    rules = [_rule(rng) for _ in range(sequences)]
    sample = SampleRows(
        row=one_each[:-1],
        temperature=rng.choice([0, 0.8, 2], sequences).astype(np.float32),
        top_k=rng.choice([0, 9], sequences).astype(np.int32),
        top_p=rng.choice([1, 0.9], sequences).astype(np.float32),
        seed=rng.integers(0, 99, sequences).astype(np.uint64),
        counter=np.zeros(sequences, np.uint64),
        rules=make_rules(rules),
        probs=None
        if rng.random() < 0.5
        else ProbRows(
            given=np.full(sequences, -1, np.int32),
            top_starts=np.cumsum([0, *rng.integers(0, 4, sequences)]).astype(np.int32),
        ),
    )
    batch = StepBatch(
        ids=rng.integers(0, VOCAB, sequences).astype(np.int32),
        query_starts=one_each,
        past_lengths=np.zeros(sequences, np.int32),
        block_tables=tables,
        logit_rows=one_each[:-1],
        sample=sample,
    )
    session.run(batch)
    batch = dataclasses.replace(batch, past_lengths=batch.past_lengths + np.int32(1))
    return batch, [int(rng.integers(0, len(rule[0]) + 1)) for rule in rules]


def _repeat(batch: StepBatch, ends: tuple[Int32, Int32], course: Course | None, most: int = MOST) -> Repeat:
    sequences, probs = len(batch.past_lengths), batch.sample.probs
    top = 0 if probs is None else int(probs.top_starts[-1])
    return Repeat(
        seconds=60,
        end_starts=ends[0],
        end_ids=ends[1],
        course=course,
        stop=np.zeros(1, np.int32),
        ids=np.full((most, sequences), -7, np.int32),
        log_probs=np.full((most, sequences), -7, np.float32),
        probs=None
        if probs is None
        else RepeatProbs(
            ranks=np.full((most, sequences), -7, np.int32),
            top_ids=np.full((most, top), -7, np.int32),
            top_log_probs=np.full((most, top), -7, np.float32),
        ),
        done=np.zeros(1, np.int32),
    )


def _bits(repeat: Repeat) -> list[bytes]:
    probs = () if repeat.probs is None else (repeat.probs.ranks, repeat.probs.top_ids, repeat.probs.top_log_probs)
    return [array.tobytes() for array in (repeat.ids, repeat.log_probs, repeat.done, *probs)]


def test_rules_go_on_from_draw_to_draw(model: TinyModel) -> None:
    counts = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sequences = int(rng.integers(1, 7))
        session = open_session(model, find_target("cpu"), sequences * 4)
        assert isinstance(session, CpuSession)
        batch, lasting = _batch(rng, session, sequences)
        ends = joined([rng.integers(0, VOCAB, rng.integers(0, 2)).tolist() for _ in range(sequences)])
        course = _course(rng, lasting) if rng.random() < 0.8 else None
        got, expected = _repeat(batch, ends, course), _repeat(batch, ends, course)
        counts.append(session.decode(batch, got))
        assert counts[-1] == decode_by_run(session, batch, expected)
        assert _bits(got) == _bits(expected)
        session.close()
    assert 1 in counts
    assert MOST in counts
    assert len(set(counts)) > 10, "many a sequence has an end of its own"


def test_a_stop_word_may_begin_before_the_first_step(model: TinyModel) -> None:
    session = open_session(model, find_target("cpu"), 4)
    assert isinstance(session, CpuSession)
    batch, _ = _batch(np.random.default_rng(1), session, 1)
    batch = dataclasses.replace(batch, sample=dataclasses.replace(batch.sample, rules=None, probs=None))
    nothing = joined([[]])
    free = _repeat(batch, nothing, None)
    session.decode(batch, free)
    drawn = free.ids[:, 0].tolist()
    stop_starts, stop_words = joined([[33, 44, *drawn[:2], -1]])
    course = Course(
        num_lasting=np.zeros(1, np.int32),
        min_steps=np.zeros(1, np.int32),
        tails=np.array([33, 44], np.int32),
        tail_starts=np.array([0, 2], np.int32),
        bad_words=nothing[1],
        bad_word_starts=nothing[0],
        stop_words=stop_words,
        stop_word_starts=stop_starts,
    )
    assert session.decode(batch, _repeat(batch, nothing, course)) == 2
    late = dataclasses.replace(course, min_steps=np.array([3], np.int32))
    with pytest.raises(RequestError, match="need rules"):
        session.decode(batch, _repeat(batch, nothing, late))
    ruled = dataclasses.replace(batch, sample=dataclasses.replace(batch.sample, rules=make_rules([NEUTRAL])))
    assert session.decode(ruled, _repeat(ruled, nothing, late)) == MOST
    session.close()


NEUTRAL: Rule = ({}, [], [], (1.0, 0.0, 0.0), 0.0)


def test_a_course_that_makes_no_sense_is_refused(model: TinyModel) -> None:
    session = open_session(model, find_target("cpu"), 8)
    assert isinstance(session, CpuSession)
    batch, _ = _batch(np.random.default_rng(0), session, 2)
    probs = ProbRows(given=np.full(2, -1, np.int32), top_starts=np.array([0, 1, 3], np.int32))
    sample = dataclasses.replace(batch.sample, rules=make_rules([NEUTRAL, NEUTRAL]), probs=probs)
    batch = dataclasses.replace(batch, sample=sample)
    ends, empty = joined([[], []]), np.zeros(0, np.int32)
    course = Course(
        num_lasting=np.zeros(2, np.int32),
        min_steps=np.zeros(2, np.int32),
        tails=empty,
        tail_starts=ends[0],
        bad_words=empty,
        bad_word_starts=ends[0],
        stop_words=empty,
        stop_word_starts=ends[0],
    )
    repeat = _repeat(batch, ends, course, 2)
    assert session.decode(batch, repeat) == 2
    given = dataclasses.replace(probs, given=np.array([3, -1], np.int32))
    starts = np.array([0, 0, 3], np.int32)

    def of_course(**fields: Any) -> Repeat:
        return dataclasses.replace(repeat, course=dataclasses.replace(course, **fields))

    for wrong, why in [
        (of_course(num_lasting=np.ones(2, np.int32)), "more than there are biases"),
        (of_course(num_lasting=empty), "one entry per sequence"),
        (of_course(tails=np.ones(3, np.int32)), "tail_starts"),
        (of_course(bad_words=np.array([1, 2, 3], np.int32), bad_word_starts=starts), "a -1 behind each word"),
        (of_course(bad_words=np.array([1, -1, -1], np.int32), bad_word_starts=starts), "too short"),
        (
            of_course(bad_words=np.array([4, 1, -1], np.int32), bad_word_starts=np.array([0, 4, 3], np.int32)),
            "not descend",
        ),
        (of_course(stop_words=np.array([4, 1, 2], np.int32), stop_word_starts=starts), "a -1 behind each word"),
        (of_course(stop_words=np.array([4, -1, -1], np.int32), stop_word_starts=starts), "too short"),
        (dataclasses.replace(repeat, probs=None), "or of neither"),
        (
            dataclasses.replace(
                repeat, probs=RepeatProbs(ranks=repeat.ids, top_ids=repeat.ids, top_log_probs=repeat.log_probs)
            ),
            "one entry per step and probability",
        ),
    ]:
        with pytest.raises(RequestError, match=why):
            session.decode(batch, wrong)
    with pytest.raises(RequestError, match="given no token"):
        session.decode(dataclasses.replace(batch, sample=dataclasses.replace(sample, probs=given)), repeat)
    drawn = int(repeat.ids[0, 1])
    outside = of_course(bad_words=np.array([drawn, VOCAB, -1], np.int32), bad_word_starts=starts)
    with pytest.raises(RequestError, match="a biased token"):
        session.decode(batch, outside)
    session.close()


RULED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2, "temperature": 0.9},
    {"bad_words_list": [[7, 9], [3], [12, 30, 4], *[[first, 11] for first in range(VOCAB)]]},
    {"min_tokens": 25, "end_id": 5, "temperature": 1.0},
    {"min_tokens": 9, "stop_token_ids": range(0, VOCAB, 4), "temperature": 1.0},
    {"stop_token_ids": [8, 9], "temperature": 1.2},
    {"stop_words_list": [[4, 5], [11, 2, 3], [40]], "temperature": 1.5},
    {"logprobs": 3, "prompt_logprobs": 1, "temperature": 0.7},
    {"logprobs": -1},
    {"logprobs": 0, "repetition_penalty": 0.9, "logit_bias": {3: 2.0}, "min_p": 0.1, "temperature": 1.0},
    {},
]


def _one(fields: dict[str, Any], place: int) -> dict[str, Any]:
    """Arguments of `generate`."""
    fields = dict(fields)
    own: dict[str, Any] = {"end_id": fields.pop("end_id", -1)}
    own |= {name: [fields.pop(name)] * PROMPTS for name in ("stop_words_list", "bad_words_list") if name in fields}
    params = SamplingParams(**{"max_tokens": 34, "temperature": 0.0, "seed": place, **fields})
    return {**own, "sampling_config": params}


def test_every_rule_repeats_in_the_runner(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = steps_of_calls(monkeypatch)
    monkeypatch.setattr(step_loop, "_MAX_REPEATS", 5)  # so that rules go on from crossing to crossing
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(PROMPTS)]
    for place, fields in enumerate(RULED):
        arguments = _one(fields, place)
        with poisoned_runner(model, find_target("cpu"), 200) as runner:  # it runs one step at a time
            one = runner.generate(prompts, output_log_probs=True, return_dict=True, **arguments)
        calls.clear()
        with make_runner(model, open_session(model, find_target("cpu"), 200)) as runner:
            several = runner.generate(prompts, output_log_probs=True, return_dict=True, **arguments)
        assert max(calls) > 1, fields
        for key in ("output_ids", "log_probs", "sequence_lengths"):
            assert several[key].tobytes() == one[key].tobytes(), fields
        assert several.get("logprobs") == one.get("logprobs")
        assert several.get("prompt_logprobs") == one.get("prompt_logprobs")
    assert caplog.records == [], "no step failed and was tried again"


@pytest.mark.parametrize("begun", [1, 2])
@pytest.mark.parametrize("kind", ["stop", "bad"])
def test_words_that_begin_before_several_steps_run_together(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, kind: str, begun: int
) -> None:
    """The prefill draws one token, the first crossing so many as are left of three, then the second begins."""
    calls = steps_of_calls(monkeypatch)
    monkeypatch.setattr(step_loop, "_MAX_REPEATS", 3)
    with make_runner(model, open_session(model, find_target("cpu"), 40)) as runner:
        free = runner.generate([[1, 2]], max_new_tokens=20, end_id=-1)[0, 0, 2:].tolist()
        assert calls[0] == 3
        first = 1 + 3 - 1  # the prompt's step may be followed by a single one
        for crossing in (first, first + 1):
            word = free[crossing - begun + 1 : crossing + 3]
            calls.clear()
            if kind == "stop":
                got = runner.generate([[1, 2]], max_new_tokens=20, end_id=-1, stop_words_list=[[word]])
                end = next(n for n in range(len(word), 21) if free[n - len(word) : n] == word)
                assert got[0, 0, 2:].tolist() == free[:end]
            else:
                got = runner.generate([[1, 2]], max_new_tokens=20, end_id=-1, bad_words_list=[[word]])
                tokens = got[0, 0, 2:].tolist()
                assert tokens != free
                assert not any(tokens[n : n + len(word)] == word for n in range(20))
            assert max(calls) > 1


def test_wide_results_end_a_repetition_early(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(model, find_target("cpu"), 200)
    counts: list[int] = []

    def counted(session: CpuSession, batch: StepBatch, repeat: Repeat) -> int:
        counts.append(len(repeat.ids))
        return decode(session, batch, repeat)

    decode = CpuSession.decode
    monkeypatch.setattr(CpuSession, "decode", counted)
    monkeypatch.setattr(repetition, "_MOST_BYTES", 2 * (3 * 12 + 8 * 3 * VOCAB))
    with make_runner(model, session) as runner:
        out = runner.generate([[1], [2], [3]], return_dict=True, **_one({"logprobs": -1}, 0))
    assert set(counts) == {2}
    assert [len(tables[0]) for tables in out["logprobs"]] == [34] * 3
