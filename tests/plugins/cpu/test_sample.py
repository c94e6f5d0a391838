"""Native sampling draws the tokens of the reference."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.op import Array
from ingot.plugins.ops.sample import Draw, sample, uniform
from ingot.plugins.target import SessionOptions
from ingot.step_io import Ending, KnownTokens, SequenceRules, StepBatch, StepResult
from tests.plugins.cpu.one_step import VOCAB, one_step_plan, runnable_isa
from tests.plugins.ops.draws import Drawing, drawing_batch, expected_draws, rows_of, start_all
from tests.plugins.test_guided_sequences import Toy

pytestmark = pytest.mark.native

LEVELS = [name.split(".")[2] for name in kernel_table() if name.startswith("sample.")]


def _run(level: str, logits: Array, drawings: Sequence[Drawing], threads: int = 2) -> StepResult:
    """The draws of a session whose logits are given: its one step gathers them."""
    batch = dataclasses.replace(drawing_batch(len(drawings)), want_logits=True)
    session = _session(level, rows_of(logits, drawings), batch, threads)
    start_all(session, drawings)
    result = session.run(batch)
    session.close()
    return result


def _session(level: str, rows: Array, batch: StepBatch, threads: int = 2) -> CpuSession:
    kernel = f"gather_rows.f32.{level}"
    plan, section = one_step_plan(kernel, [rows], {}, batch, gives_logits=True)
    options = SessionOptions(num_blocks=(len(rows),), threads=threads)
    session: CpuSession = open_native(plan, section, options, runnable_isa(kernel))
    session.native.write_buffer("in0", rows)
    return session


def _draw(level: str, logits: Array, drawings: Sequence[Drawing]) -> StepResult:
    """The same from a session's `draw`."""
    rows = rows_of(logits, drawings)
    session = _session(level, rows, drawing_batch(len(drawings)))
    start_all(session, drawings)
    try:
        return session.draw(np.arange(len(drawings), dtype=np.int32), rows, rows)
    finally:
        session.close()


def _logits(rows: int, vocab: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def _check(result: StepResult, logits: Array, drawings: Sequence[Drawing]) -> None:
    expected = expected_draws(logits, drawings)
    np.testing.assert_array_equal(result.ids, expected.ids)
    np.testing.assert_array_equal(result.ends, expected.ends)
    np.testing.assert_allclose(result.log_probs, expected.log_probs, rtol=1e-6, atol=2e-6)
    assert result.logits is not None
    np.testing.assert_array_equal(result.logits, rows_of(logits, drawings))


def _greedy(count: int) -> list[Drawing]:
    return [Drawing(row=row) for row in range(count)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [1, 15, 17, 65, 3001])
def test_draws_as_the_reference(level: str, vocab: int) -> None:
    logits = _logits(5, vocab)
    random = np.random.default_rng(1)
    drawings = [
        Drawing(
            row=int(random.integers(5)),
            rules=SequenceRules(
                temperature=float(random.choice([0.0, 0.3, 1.0, 2.5])),
                top_k=int(random.choice([0, 1, 2, 5, 40, vocab, vocab + 1])),
                top_p=float(random.choice([1.0, 0.95, 0.5, 1e-6, 0.999])),
                seed=int(random.integers(0, 2**63)),
            ),
            generated=[0] * int(random.integers(0, 90)),
        )
        for _ in range(120)
    ]
    _check(_run(level, logits, drawings), logits, drawings)


@pytest.mark.parametrize("level", LEVELS)
def test_ties_masks_and_extremes(level: str) -> None:
    logits = _logits(4, 33)
    logits[0] = np.repeat([1.0, 2.0, 2.0], 11)  # ties: the lower id first
    logits[1, ::2] = -np.inf
    logits[2] = 1e30
    logits[2, 20] = 3e38
    cases = [(0, 0, 0, 1), (0, 1, 12, 1), (0, 1, 1, 1), (1, 0, 0, 1), (1, 1, 20, 0.7), (2, 0, 0, 1), (2, 1, 0, 0.5)]
    drawings = [
        Drawing(row=row, rules=SequenceRules(temperature=t, top_k=k, top_p=p, seed=place), generated=[0] * place)
        for place, (row, t, k, p) in enumerate([*cases, (3, 1e-3, 0, 1)])
    ]
    _check(_run(level, logits, drawings), logits, drawings)


@pytest.mark.parametrize("level", LEVELS)
def test_draws_of_what_a_mask_allows(level: str) -> None:
    """Of rows that end in the middle of a word of the mask, or beyond it."""
    vocab, random = 1000 + 13, np.random.default_rng(3)
    logits = _logits(4, vocab)
    logits[3, 40:] = -np.inf
    masks = [[7], [991], [990, 991], range(960), range(0, 992, 7), random.integers(0, 992, 40).tolist(), [50], [50, 60]]
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"logit_bias": ((50, 1.0),)},
    ]
    rules += [{"logit_bias": ((50, 1.0),)}, {"bad_words": ((7,),)}, {"repetition_penalty": 1.3}]
    drawings = [
        Drawing(row=place % 4, rules=SequenceRules(grammar=Toy(mask, [0], words=31), seed=place, **fields))
        for place, (mask, fields) in enumerate(itertools.product(masks, rules))
    ]
    _check(_run(level, logits, drawings), logits, drawings)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_with_nan_give_a_token_and_no_probability(level: str) -> None:
    logits = _logits(2, 100)
    logits[0, 57:] = np.nan
    logits[1] = -np.inf
    cases = [(0, 0, 0, 1), (0, 1, 3, 0.5), (1, 0, 0, 1), (1, 1, 0, 1)]
    drawings = [Drawing(row=row, rules=SequenceRules(temperature=t, top_k=k, top_p=p)) for row, t, k, p in cases]
    result = _run(level, logits, drawings)
    assert result.ids.tolist() == [[57, 57, 0, 0]]
    assert set(result.ends) == {Ending.FAILED}
    assert np.isnan(result.log_probs).all()


@pytest.mark.parametrize("level", LEVELS)
def test_the_best_of_a_long_row_is_the_first_one(level: str) -> None:
    """Rows are read in parts of 1,024."""
    vocab = 4 * 1024 + 37
    places = [0, 1023, 1024, 2048, 4095, 4096, vocab - 1]
    logits = _logits(len(places) + 2, vocab)
    for row, place in enumerate(places):
        logits[row, place] = 50.0
        logits[row, min(place + 1024, vocab - 1)] = 50.0
        logits[row, :place:3] = -np.inf
    logits[-2] = -np.inf
    logits[-2, 3000] = -1e30
    logits[-1, :2048] = -np.inf
    drawings = _greedy(len(logits))
    result = _run(level, logits, drawings)
    _check(result, logits, drawings)
    assert result.ids[0, : len(places)].tolist() == places


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", [5, 1030, 4132])
def test_one_strange_number_in_a_long_row(level: str, place: int) -> None:
    logits = _logits(2, 4 * 1024 + 37)
    logits[0, place], logits[1, place] = np.nan, np.inf
    result = _run(level, logits, _greedy(2))
    assert result.ids.tolist() == [[place, place]]
    assert np.isnan(result.log_probs).all()


@pytest.mark.daily(1)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [2, 17, 301])
def test_random_rules_draw_as_the_reference(level: str, vocab: int) -> None:
    """Every parameter mixed at random; `draw` on given logits gives the same as the end of a step."""
    random = np.random.default_rng(vocab)
    logits, count = _logits(5, vocab), 150
    drawings = []
    for _ in range(count):
        bias = tuple((int(t), float(random.choice([-np.inf, -2.0, 0.5, 3.0]))) for t in random.integers(0, vocab, 4))
        history = random.integers(0, vocab, 12).tolist()
        split = int(random.integers(1, 13))
        wanted = int(random.choice([-1, 0, 1, min(5, vocab), vocab]))
        rules = SequenceRules(
            temperature=float(random.choice([0.0, 0.4, 1.0, 2.5])),
            top_k=int(random.choice([0, 1, 3, 40])),
            top_p=float(random.choice([1.0, 0.95, 0.5])),
            min_p=float(random.choice([0, 0.05, 0.4])),
            seed=int(random.integers(0, 2**63)),
            repetition_penalty=float(random.choice([0.5, 1.0, 1.3])),
            frequency_penalty=float(random.choice([0, random.normal()])),
            presence_penalty=float(random.choice([0, random.normal()])),
            logit_bias=() if random.random() < 0.3 else bias,
            top=None if wanted < 0 else wanted,
        )
        drawings.append(
            Drawing(row=int(random.integers(5)), rules=rules, prompt=history[:split], generated=history[split:])
        )
    expected = expected_draws(logits, drawings)
    assert (expected.ids < 0).sum() < count / 2
    for result in (_run(level, logits, drawings), _draw(level, logits, drawings)):
        for name in ("ids", "token_ranks", "top_ids", "ends"):
            np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
        for name in ("log_probs", "top_log_probs"):
            np.testing.assert_allclose(getattr(result, name), getattr(expected, name), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_known_tokens_stand_behind_what_is_drawn(level: str) -> None:
    logits = _logits(4, 301)
    batch = drawing_batch(4)
    known = KnownTokens(
        row=np.array([0, 1, 1], np.int32), token=np.array([7, 300, 0], np.int32), top=np.array([2, 0, 301], np.int32)
    )
    session = _session(level, logits, batch)
    start_all(session, _greedy(4))
    result = session.run(dataclasses.replace(batch, draws=batch.draws[2:], known=known))
    session.close()
    rules = [SequenceRules(), SequenceRules(), *(SequenceRules(top=top) for top in known.top.tolist())]
    tokens, rows = [-1, -1, *known.token.tolist()], [2, 3, *known.row.tolist()]
    draws = [Draw(row=row, rules=r, known=token) for row, r, token in zip(rows, rules, tokens, strict=True)]
    expected = sample(logits, draws)
    for name in ("ids", "token_ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(result, name)[0], getattr(expected, name))
    for name in ("log_probs", "top_log_probs"):
        np.testing.assert_allclose(getattr(result, name)[0], getattr(expected, name), rtol=1e-6, atol=2e-6)
    assert result.ends.tolist() == [Ending.NONE, Ending.NONE]


def test_sequences_that_break_the_contract_are_refused() -> None:
    logits = _logits(1, VOCAB)
    wrong: list[tuple[Drawing, str]] = [
        (Drawing(row=0, rules=rules), why)
        for rules, why in [
            (SequenceRules(temperature=float("nan")), "temperature"),
            (SequenceRules(temperature=-1), "temperature"),
            (SequenceRules(top_k=-1), "top_k"),
            (SequenceRules(top_p=0), "top_p"),
            (SequenceRules(min_p=1.5), "min_p"),
            (SequenceRules(repetition_penalty=0.0), "repetition"),
            (SequenceRules(presence_penalty=np.inf), "penalties must be numbers"),
            (SequenceRules(logit_bias=((VOCAB, 1.0),)), "logit_bias names token "),
            (SequenceRules(logit_bias=((0, np.inf),)), "a value of logit_bias is inf, expected a finite number"),
            (SequenceRules(bad_words=((),)), "a bad word has no token"),
            (SequenceRules(bad_words=((0, VOCAB),)), "a bad word ends with token "),
            (SequenceRules(stop_words=((),)), "a stop word has no token"),
            (SequenceRules(end_ids=(VOCAB,), min_tokens=1), "min_tokens bans end token "),
            (SequenceRules(top=VOCAB + 1), f"logprobs asks for {VOCAB + 1} tokens"),
        ]
    ]
    wrong.append((Drawing(row=0, prompt=[-1]), "the sequence has token -1, expected 0 to"))
    wrong.append((Drawing(row=0, prompt=[]), "one token at least"))
    for drawing, why in wrong:
        with pytest.raises(RequestError, match=why):
            _draw("avx2", logits, [drawing])


def test_logits_of_another_shape_are_refused() -> None:
    logits = _logits(1, VOCAB)
    session = _session("avx2", logits, drawing_batch(1))
    start_all(session, _greedy(1))
    slot = np.zeros(1, np.int32)
    for wrong in (_logits(1, VOCAB + 1), _logits(2, VOCAB)):
        for given in ((wrong, logits), (logits, wrong)):
            with pytest.raises(RequestError, match="columns"):
                session.draw(slot, *given)
    with pytest.raises(RequestError, match="a slot is 1"):
        session.draw(slot + np.int32(1), logits, logits)
    with pytest.raises(RequestError, match="num_prompt is beyond"):
        session.start(0, SequenceRules(), slot, 2)
    session.close()


def test_philox_matches_known_answers() -> None:
    """The first word of Random123's known answers with counter and key of zeros and of ones."""
    assert uniform(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24
