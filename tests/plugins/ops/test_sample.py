"""The reference of op sample: its sets, its distribution and its randomness, against simple independent ones."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from ingot.plugins.ops.sample import Draw, draw_token, edited, sample, uniform
from ingot.step_io import SequenceRules

Array = npt.NDArray[np.float32]


def kept(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> dict[int, float]:
    """Probability of every token that may be drawn, by the definition and with Python's own floats."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    best = float(logits[order[0]])
    order = [i for i in order if math.exp((float(logits[i]) - best) / temperature) >= min_p]
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


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0),
        (0.5, 0, 1.0, 0),
        (2.0, 5, 1.0, 0),
        (1.0, 0, 0.7, 0),
        (1.3, 8, 0.8, 0),
        (1.0, 1, 1.0, 0),
        (1.0, 0, 1e-9, 0),
        (1.5, 0, 1.0, 0.1),
        (2.0, 6, 0.9, 0.2),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(1).standard_normal(24).astype(np.float32) * 2
    expected = kept(logits, temperature, top_k, top_p, min_p)
    draws = 4000
    counts: dict[int, int] = {}
    for counter in range(draws):
        token = draw_token(logits, temperature, top_k, top_p, 7, counter, min_p)
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
    assert draw_token(logits, 0, 0, 1.0, 0, 0) == 1
    assert {draw_token(logits, 1.0, 2, 1.0, 5, counter) for counter in range(60)} == {1, 2}
    assert {draw_token(logits, 1.0, 0, 0.5, 5, counter) for counter in range(60)} == {1, 2}


def test_a_draw_depends_on_its_row_alone() -> None:
    logits = np.random.default_rng(2).standard_normal((3, 30)).astype(np.float32)

    draws = [
        Draw(row=0, rules=SequenceRules(seed=1)),
        Draw(row=1, rules=SequenceRules(temperature=1.5, top_p=0.9, seed=2**64 - 1), counter=2**40),
        Draw(row=2, rules=SequenceRules(temperature=0.7, top_k=9, seed=3), counter=5),
    ]
    drawn, other = sample(logits, draws), sample(logits, [draws[2], draws[0], draws[1]])
    ids, log_probs = drawn.ids, drawn.log_probs
    assert ids.tolist() == other.ids[[1, 2, 0]].tolist()
    assert log_probs.tolist() == other.log_probs[[1, 2, 0]].tolist()
    wide = logits.astype(np.float64)
    expected = wide[range(3), ids] - np.log(np.exp(wide).sum(axis=1))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-6)


def plain_rules(
    logits: Array, bias: dict[int, float], prompt: list[int], output: list[int], penalties: tuple[float, float, float]
) -> list[float]:
    """Biases and penalties token by token, as they are defined, every operation rounded to float32."""
    repetition, frequency, presence = (np.float32(value) for value in penalties)
    changed = []
    for token, x in enumerate(logits):
        if token in bias:
            x = np.float32(x + np.float32(bias[token]))
        if token in prompt or token in output:
            x = x / repetition if x > 0 else x * repetition
        x = x - frequency * np.float32(output.count(token))
        changed.append(float(x - presence * np.float32(token in output)))
    return changed


@pytest.mark.parametrize("seed", range(12))
def test_rules_change_logits_exactly(seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(30) * 3).astype(np.float32)
    prompt, output = random.integers(0, 30, (2, 20)).tolist()
    prompt, output = prompt[: seed * 2], output[: 20 - seed]
    bias = {int(token): float(random.choice([-np.inf, -1.5, 0.3, 4.0])) for token in random.integers(0, 30, 5)}
    penalties = (1.7, -0.4, 0.9) if seed % 2 else (0.6, 1.1, -0.2)
    rules = SequenceRules(
        repetition_penalty=penalties[0], frequency_penalty=penalties[1], presence_penalty=penalties[2]
    )
    draw = Draw(
        row=0,
        rules=rules,
        bias_ids=list(bias),
        bias=list(bias.values()),
        history=[*prompt, *output],
        num_prompt=len(prompt),
    )
    assert edited(logits, draw).tolist() == plain_rules(logits, bias, prompt, output, penalties)


def test_probabilities_are_those_of_the_raw_logits() -> None:
    logits = (np.random.default_rng(8).standard_normal((2, 40)) * 2).astype(np.float32)
    logits[1, 5] = logits[1, 9] = logits[1].max() + 1  # a tie: the lower id is ahead
    draws = [
        Draw(row=0, rules=SequenceRules(top=3), bias_ids=[int(logits[0].argmax())], bias=[-np.inf]),
        Draw(row=1, rules=SequenceRules(top=0), known=9),
        Draw(row=1, rules=SequenceRules(top=40), known=3),
    ]
    result = sample(logits, draws)
    order = np.argsort(-logits, axis=1, kind="stable")
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    assert result.ids.tolist() == [order[0, 1], 9, 3]
    assert result.token_ranks is not None
    assert result.token_ranks.tolist() == [2, 2, 1 + order[1].tolist().index(3)]
    assert result.top_ids is not None
    assert result.top_ids.tolist() == [*order[0, :3], *order[1]]
    assert result.top_log_probs is not None
    np.testing.assert_allclose(result.top_log_probs[:3], expected[0, order[0, :3]], rtol=1e-6)
    np.testing.assert_allclose(result.top_log_probs[3:], expected[1, order[1]], rtol=1e-6)
    np.testing.assert_allclose(result.log_probs, expected[[0, 1, 1], result.ids], rtol=1e-6)


def test_rules_that_leave_nothing() -> None:
    draw = Draw(row=0, rules=SequenceRules(temperature=1), bias_ids=range(4), bias=[-np.inf] * 4)
    result = sample(np.ones((1, 4), np.float32), [draw])
    assert result.ids.tolist() == [-1]
    assert result.log_probs.tolist() == [-np.inf]
