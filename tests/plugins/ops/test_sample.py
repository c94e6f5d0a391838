"""The reference of op sample: its sets, its distribution and its randomness, against simple independent ones."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from ingot.plugins.ops.sample import draw, sample, uniform
from ingot.step_io import SampleRows

Array = npt.NDArray[np.float32]


def kept(logits: Array, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Probability of every token that may be drawn, by the definition and with Python's own floats."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if top_k > 0:
        order = order[:top_k]
    weights = [math.exp((float(logits[i]) - float(logits[order[0]])) / temperature) for i in order]
    total = sum(weights)
    head, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        head.append((token, weight))
        mass += weight
        if top_p < 1 and mass >= top_p * total:
            break
    return {token: weight / sum(w for _, w in head) for token, weight in head}


def chi_square(counts: dict[int, int], expected: dict[int, float], draws: int) -> float:
    return sum((counts.get(t, 0) - draws * p) ** 2 / (draws * p) for t, p in expected.items())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.7), (1.3, 8, 0.8), (1.0, 1, 1.0), (1.0, 0, 1e-9)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(1).standard_normal(24).astype(np.float32) * 2
    expected = kept(logits, temperature, top_k, top_p)
    draws = 4000
    counts: dict[int, int] = {}
    for counter in range(draws):
        token = draw(logits, temperature, top_k, top_p, 7, counter)
        counts[token] = counts.get(token, 0) + 1
    assert set(counts) <= set(expected)
    freedom = len(expected) - 1
    # mean + 5 standard deviations of the chi-square distribution
    assert chi_square(counts, expected, draws) <= freedom + 5 * math.sqrt(2 * freedom)


def test_many_rows_and_seeds_are_uniform() -> None:
    values = np.array([uniform(seed, 3) for seed in range(4000)])
    histogram = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((histogram - 200) ** 2 / 200).sum() < 19 + 5 * math.sqrt(38)
    assert values.min() >= 0
    assert values.max() < 1


def test_philox_known_answer() -> None:
    """First word of Philox4x32-10 for a zero key and counter, from the authors' known-answer file."""
    assert uniform(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24


def test_ties_go_to_the_lower_id() -> None:
    logits = np.array([1, 3, 3, 0, 3], np.float32)
    assert draw(logits, 0, 0, 1.0, 0, 0) == 1
    assert {draw(logits, 1.0, 2, 1.0, 5, counter) for counter in range(60)} == {1, 2}
    assert {draw(logits, 1.0, 0, 0.5, 5, counter) for counter in range(60)} == {1, 2}


def test_a_draw_depends_on_its_row_alone() -> None:
    logits = np.random.default_rng(2).standard_normal((3, 30)).astype(np.float32)

    def rows(order: list[int]) -> SampleRows:
        return SampleRows(
            row=np.array(order, np.int32), temperature=np.array([0, 1.5, 0.7], np.float32)[order],
            top_k=np.array([0, 0, 9], np.int32)[order], top_p=np.array([1, 0.9, 1], np.float32)[order],
            seed=np.array([1, 2**64 - 1, 3], np.uint64)[order], counter=np.array([0, 2**40, 5], np.uint64)[order],
        )  # fmt: skip

    ids, log_probs = sample(logits, rows([0, 1, 2]))
    other_ids, other_log_probs = sample(logits, rows([2, 0, 1]))
    assert ids.tolist() == other_ids[[1, 2, 0]].tolist()
    assert log_probs.tolist() == other_log_probs[[1, 2, 0]].tolist()
    wide = logits.astype(np.float64)
    expected = wide[range(3), ids] - np.log(np.exp(wide).sum(axis=1))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-6)
