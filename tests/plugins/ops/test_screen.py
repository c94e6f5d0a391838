"""The reference of op screen: its codes, its bound, and that it finds the token of the full product."""

import math

import numpy as np
import pytest

from ingot.plugins.op import Array, Call, KvCache
from ingot.plugins.ops.screen import GROUP, SLACK, SPREAD, STEP, bound, dither, half_codes, reference
from ingot.plugins.quantised import QuantisedRows, round_to_int8
from ingot.plugins.weight_values import product
from tests.plugins.ops.calls import LAYOUT, ONE_TOKEN, random_array
from tests.plugins.ops.screens import CASES, head_of, rows_of

K = 300
FIRST = [1, 8, 14, 3, 15, 13, 14, 8]  # of the dither: engines that exist have it


def run(x: Array, head: QuantisedRows) -> tuple[list[int], list[int]]:
    """Tokens and numbers of candidates by the reference."""
    inputs: list[Array | QuantisedRows | None] = [
        x,
        product(x, half_codes(head), "int8"),
        half_codes(head),
        dither(x.shape[1]),
        head,
    ]
    ids, counts = reference(Call(inputs=inputs, attrs={"group": GROUP}, batch=ONE_TOKEN, kv=[KvCache(LAYOUT, 1)]))
    return ids[:, 0].astype(int).tolist(), counts[:, 0].astype(int).tolist()


def test_codes_are_what_dither_makes_of_them() -> None:
    every = np.tile(np.arange(-127, 128, dtype=np.int8)[:, None], (1, K))
    halved = half_codes(QuantisedRows(scale=np.ones(255, np.float32), codes=every))
    lost = every.astype(int) - (STEP * halved.codes.astype(int) + 9 - dither(K).astype(int))
    assert (halved.codes.min(), halved.codes.max()) == (-8, 7)
    assert (lost.min(), lost.max()) == (0, STEP - 1)
    assert (halved.integers == halved.codes).all()
    for line in lost:  # every code loses each number in about as many columns
        assert np.bincount(line, minlength=STEP).max() < 3 * K / STEP


def test_dither_is_uniform_and_the_same_for_ever() -> None:
    drawn = dither(1 << 16)
    counts = np.bincount(drawn.astype(int), minlength=STEP)
    expected = len(drawn) / STEP
    assert len(counts) == STEP
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi square of 16 degrees: 1 in 10,000
    np.testing.assert_array_equal(dither(100), drawn[:100])  # the same for longer rows
    assert drawn[:8].astype(int).tolist() == FIRST


def test_what_is_lost_is_no_wider_than_a_normal_number() -> None:
    """log E[exp(t e)] <= 24 t^2 / 2 for e uniform on -8 .. 8, the inequality behind the bound."""
    e = np.arange(-8, 9)
    for t in np.geomspace(1e-3, 8, 200):
        assert math.log(np.exp(t * e).mean()) <= 12 * t * t


def test_bound_holds_and_says_something() -> None:
    """Over the draws of the dither, for one row of weights and activations that know nothing of them."""
    rng = np.random.default_rng(1)
    codes = rng.integers(-127, 128, K)
    x, scale = round_to_int8(random_array(1, K))
    exact = int((codes * x[0]).sum())
    errors, reaches = [], set()
    for _ in range(4000):
        spread = rng.integers(0, STEP, K)
        known, reach = bound(x[0], float(scale[0]), spread.astype(np.float32))
        errors.append(exact - STEP * int(((codes + 127 + spread) // STEP - 8) @ x[0].astype(int)) - known)
        reaches.add(reach)
    (reach,) = reaches
    width = math.sqrt(24 * float((x.astype(float) ** 2).sum()))
    assert reach == pytest.approx(SPREAD * width, rel=0.01)
    assert np.abs(errors).max() < reach
    assert np.std(errors) == pytest.approx(width, rel=0.05)
    assert np.mean(np.abs(errors) > 2 * width) < 2 * math.exp(-2)


def test_one_column_has_the_sure_bound() -> None:
    x = np.zeros((1, K), np.float32)
    x[0, 7] = 3
    codes, scale = round_to_int8(x)
    assert bound(codes[0], float(scale[0]), dither(K))[1] == (8 + SLACK) * 127


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", [1, 17, 64, 300])
def test_token_is_that_of_the_full_product(case: str, k: int) -> None:
    x, head = CASES[case](k)
    full = product(x, head, "int8")
    ids, counts = run(x, head)
    for row, token in enumerate(ids):
        if token >= 0:
            assert token == int(np.argmax(full[row])), case
            assert 1 <= counts[row] <= len(head.scale) // 8
        else:
            assert counts[row] > len(head.scale) // 8 or not np.isfinite(full[row]).all()


def test_few_candidates_remain_and_the_likeliest_is_not_always_the_best() -> None:
    x, head = rows_of(40, K), head_of(4000, K)
    ids, counts = run(x, head)
    best = product(x, head, "int8").argmax(axis=1)
    assert ids == best.tolist()
    assert np.median(counts) < 200
    likeliest = product(x, half_codes(head), "int8") * STEP
    codes, scales = round_to_int8(x)
    known = np.array([bound(code, 1.0, dither(K))[0] for code in codes])
    likeliest += (scales * known)[:, None] * head.scale
    assert (likeliest.argmax(axis=1) != best).any()


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_not_decided(strange: float) -> None:
    x, head = rows_of(2, K), head_of(400, K)
    x[1, 5] = strange
    assert run(x, head)[0][1] == -1
    head.scale[3] = np.nan
    assert run(x, head)[0] == [-1, -1]


def test_tiny_and_huge_numbers() -> None:
    for size in (1e-38, 1e-25, 1e25, 1e38):
        x, head = rows_of(4, K), head_of(400, K)
        x = (x / np.abs(x).max() * np.float32(size)).astype(np.float32)
        best = product(x, head, "int8").argmax(axis=1).tolist()
        assert all(token in (-1, one) for token, one in zip(run(x, head)[0], best, strict=True)), size
