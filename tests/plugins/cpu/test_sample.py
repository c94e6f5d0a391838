"""Native sampling draws the tokens of the reference."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from ingot.plugins.cpu.target import CpuSession, kernel_table, open_native
from ingot.plugins.op import Array
from ingot.plugins.ops.sample import sample, uniform
from ingot.plugins.target import SessionOptions
from ingot.step_io import SampleRows, StepResult
from tests.plugins.cpu.one_step import draws, one_step_plan, plain_batch, runnable_isa

pytestmark = pytest.mark.native

LEVELS = [name.split(".")[2] for name in kernel_table() if name.startswith("sample.")]


def _run(level: str, logits: Array, rows: SampleRows, threads: int = 2) -> StepResult:
    """The draws of a session whose logits are given: its one step gathers them."""
    plain = plain_batch(len(logits), range(len(logits)))
    batch = dataclasses.replace(plain, ids=np.zeros(len(logits), np.int32), sample=rows, want_logits=True)
    kernel = f"gather_rows.f32.{level}"
    plan, section = one_step_plan(kernel, [logits], {}, batch, gives_logits=True)
    session: CpuSession = open_native(
        plan, section, SessionOptions(num_blocks=64, threads=threads), runnable_isa(kernel)
    )
    session.native.write_buffer("in0", logits)
    result = session.run(batch)
    session.close()
    return result


def _logits(rows: int, vocab: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def _check(result: StepResult, logits: Array, rows: SampleRows) -> None:
    ids, log_probs = sample(logits, rows)
    np.testing.assert_array_equal(result.ids, ids)
    np.testing.assert_allclose(result.log_probs, log_probs, rtol=1e-6, atol=2e-6)
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
        [0, 0, 0, 1, 1, 2, 2, 3], temperature=[0, 1, 1, 0, 1, 0, 1, 1e-3], top_k=[0, 12, 1, 0, 20, 0, 0, 0],
        top_p=[1, 1, 1, 1, 0.7, 1, 0.5, 1], seed=range(8), counter=range(8),
    )  # fmt: skip
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


def test_philox_matches_known_answers() -> None:
    """The first word of Random123's known answers with counter and key of zeros and of ones."""
    assert uniform(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24
