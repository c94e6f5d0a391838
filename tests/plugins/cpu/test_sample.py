"""Native sampling draws the tokens of the reference."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from ingot.errors import RequestError
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.op import Array
from ingot.plugins.ops.sample import sample, uniform
from ingot.plugins.target import SessionOptions
from ingot.step_io import ProbRows, SampleRows, StepResult
from tests.plugins.cpu.one_step import VOCAB, draws, one_step_plan, plain_batch, runnable_isa
from tests.plugins.ops.draws import Rule, make_rules

pytestmark = pytest.mark.native

LEVELS = [name.split(".")[2] for name in kernel_table() if name.startswith("sample.")]


def _run(level: str, logits: Array, rows: SampleRows, threads: int = 2) -> StepResult:
    """The draws of a session whose logits are given: its one step gathers them."""
    plain = plain_batch(len(logits), range(len(logits)))
    batch = dataclasses.replace(plain, ids=np.zeros(len(logits), np.int32), sample=rows, want_logits=True)
    kernel = f"gather_rows.f32.{level}"
    plan, section = one_step_plan(kernel, [logits], {}, batch, gives_logits=True)
    session: CpuSession = open_native(
        plan, section, SessionOptions(num_blocks=(64,), threads=threads), runnable_isa(kernel)
    )
    session.native.write_buffer("in0", logits)
    result = session.run(batch)
    session.close()
    return result


def _draw(level: str, logits: Array, rows: SampleRows, given: Array | None = None) -> StepResult:
    """The same from a session's `draw`; `given`: other logits than those its shapes are made for."""
    kernel = f"gather_rows.f32.{level}"
    plan, section = one_step_plan(kernel, [logits], {}, plain_batch(len(logits), [0]), gives_logits=True)
    session = open_native(plan, section, SessionOptions(num_blocks=(1,), threads=2), runnable_isa(kernel))
    try:
        return session.draw(logits if given is None else given, rows)
    finally:
        session.close()


def _probs(given: list[int], top_starts: list[int]) -> ProbRows:
    return ProbRows(given=np.array(given, np.int32), top_starts=np.array(top_starts, np.int32))


def _logits(rows: int, vocab: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def _check(result: StepResult, logits: Array, rows: SampleRows) -> None:
    expected = sample(logits, rows)
    np.testing.assert_array_equal(result.ids, expected.ids)
    np.testing.assert_allclose(result.log_probs, expected.log_probs, rtol=1e-6, atol=2e-6)
    assert result.logits is not None
    np.testing.assert_array_equal(result.logits, logits)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [1, 15, 17, 65, 3001])
def test_draws_as_the_reference(level: str, vocab: int) -> None:
    logits = _logits(5, vocab)
    random = np.random.default_rng(1)
    count = 120
    top_k: npt.NDArray[np.int64] = random.choice([0, 1, 2, 5, 40, vocab, vocab + 1], count)
    rows = draws(
        random.integers(0, 5, count).tolist(),
        temperature=random.choice([0.0, 0.3, 1.0, 2.5], count).tolist(),
        top_k=top_k.tolist(),
        top_p=random.choice([1.0, 0.95, 0.5, 1e-6, 0.999], count).tolist(),
        seed=random.integers(0, 2**63, count).tolist(),
        counter=random.integers(0, 2**40, count).tolist(),
    )
    _check(_run(level, logits, rows), logits, rows)


@pytest.mark.parametrize("level", LEVELS)
def test_ties_masks_and_extremes(level: str) -> None:
    logits = _logits(4, 33)
    logits[0] = np.repeat([1.0, 2.0, 2.0], 11)  # ties: the lower id first
    logits[1, ::2] = -np.inf
    logits[2] = 1e30
    logits[2, 20] = 3e38
    rows = draws(
        [0, 0, 0, 1, 1, 2, 2, 3],
        temperature=[0, 1, 1, 0, 1, 0, 1, 1e-3],
        top_k=[0, 12, 1, 0, 20, 0, 0, 0],
        top_p=[1, 1, 1, 1, 0.7, 1, 0.5, 1],
        seed=range(8),
        counter=range(8),
    )
    _check(_run(level, logits, rows), logits, rows)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_with_nan_give_a_token_and_no_probability(level: str) -> None:
    logits = _logits(2, 100)
    logits[0, 57:] = np.nan
    logits[1] = -np.inf
    rows = draws([0, 0, 1, 1], temperature=[0, 1, 0, 1], top_k=[0, 3, 0, 0], top_p=[1, 0.5, 1, 1])
    result = _run(level, logits, rows)
    assert result.ids.tolist() == [57, 57, 0, 0]
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
    rows = draws(range(len(logits)))
    result = _run(level, logits, rows)
    _check(result, logits, rows)
    assert result.ids[: len(places)].tolist() == places


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", [5, 1030, 4132])
def test_one_strange_number_in_a_long_row(level: str, place: int) -> None:
    logits = _logits(2, 4 * 1024 + 37)
    logits[0, place], logits[1, place] = np.nan, np.inf
    result = _run(level, logits, draws([0, 1]))
    assert result.ids.tolist() == [place, place]
    assert np.isnan(result.log_probs).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [2, 17, 301])
def test_random_rules_draw_as_the_reference(level: str, vocab: int) -> None:
    """Every parameter mixed at random; `draw` on given logits gives the same as the end of a step."""
    random = np.random.default_rng(vocab)
    logits, count = _logits(5, vocab), 150
    rules: list[Rule] = []
    for _ in range(count):
        bias = {int(t): float(random.choice([-np.inf, -2.0, 0.5, 3.0])) for t in random.integers(0, vocab, 4)}
        history = random.integers(0, vocab, 12).tolist()
        split = int(random.integers(0, 13))
        penalties = (float(random.choice([0.5, 1.0, 1.3])), float(random.normal()), float(random.normal()))
        plain = random.random() < 0.3
        rules.append(
            ({} if plain else bias, history[:split], history[split:], penalties, float(random.choice([0, 0.05, 0.4])))
        )
    wanted = random.choice([0, 1, 5, vocab], count).clip(max=vocab)
    rows = dataclasses.replace(
        draws(
            random.integers(0, 5, count).tolist(),
            temperature=random.choice([0.0, 0.4, 1.0, 2.5], count).tolist(),
            top_k=random.choice([0, 1, 3, 40], count).tolist(),
            top_p=random.choice([1.0, 0.95, 0.5], count).tolist(),
            seed=random.integers(0, 2**63, count).tolist(),
            counter=random.integers(0, 2**40, count).tolist(),
        ),
        rules=make_rules(rules),
        probs=ProbRows(
            given=np.where(random.random(count) < 0.2, random.integers(0, vocab, count), -1).astype(np.int32),
            top_starts=np.cumsum([0, *wanted]).astype(np.int32),
        ),
    )
    expected = sample(logits, rows)
    assert (expected.ids < 0).sum() < count / 2
    for result in (_run(level, logits, rows), _draw(level, logits, rows)):
        for name in ("ids", "ranks", "top_ids"):
            np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))
        for name in ("log_probs", "top_log_probs"):
            np.testing.assert_allclose(getattr(result, name), getattr(expected, name), rtol=1e-6, atol=2e-6)


def test_draws_that_break_the_contract_are_refused() -> None:
    logits = _logits(1, VOCAB)
    nothing: Rule = ({}, [], [], (1.0, 0.0, 0.0), 0.0)
    wrong: list[tuple[SampleRows, str]] = [
        (draws([1]), "a sample row is 1"),
        (dataclasses.replace(draws([0]), rules=make_rules([nothing, nothing])), "equal lengths"),
        (dataclasses.replace(draws([0]), rules=make_rules([({VOCAB: 1.0}, *nothing[1:])])), "a biased token is"),
        (dataclasses.replace(draws([0]), rules=make_rules([({}, [-1], *nothing[2:])])), "a token of the history is"),
        (dataclasses.replace(draws([0]), rules=make_rules([({0: np.inf}, *nothing[1:])])), "a bias must be"),
        (dataclasses.replace(draws([0]), rules=make_rules([(*nothing[:3], (0.0, 0.0, 0.0), 0.0)])), "repetition"),
        (dataclasses.replace(draws([0]), rules=make_rules([(*nothing[:4], 1.5)])), "min_p"),
        (dataclasses.replace(draws([0]), probs=_probs([VOCAB], [0, 1])), "a given token is"),
        (dataclasses.replace(draws([0]), probs=_probs([0], [0, VOCAB + 1])), "fewer tokens"),
        (dataclasses.replace(draws([0]), probs=_probs([0], [1, 0])), "top_starts"),
        (dataclasses.replace(draws([0]), probs=_probs([0], [])), "top_starts"),
    ]
    for rows, why in wrong:
        with pytest.raises(RequestError, match=why):
            _draw("avx2", logits, rows)
    with pytest.raises(RequestError, match="columns"):
        _draw("avx2", logits, draws([0]), given=_logits(1, VOCAB + 1))


def test_philox_matches_known_answers() -> None:
    """The first word of Random123's known answers with counter and key of zeros and of ones."""
    assert uniform(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24
