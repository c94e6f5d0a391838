"""Op screened_matmul: its codes, its bound, and that what it leaves has the token of the full product."""

import math

import numpy as np
import pytest

from ingot.plan import Attr
from ingot.plugins.op import Array, Call, KvCache, Operand
from ingot.plugins.ops.screened_matmul import (
    OP,
    SLACK,
    SPREAD,
    STEP,
    bound,
    candidates,
    dither,
    half_codes,
    reference,
    screened,
)
from ingot.plugins.quantised import QuantisedRows, round_to_int8
from ingot.plugins.weight_values import product
from tests.plugins.ops.calls import LAYOUT, ONE_TOKEN, random_array
from tests.plugins.ops.screened import CASES, head_of, rows_of

K = 300
FIRST = [1, 8, 14, 3, 15, 13, 14, 8]  # of the dither: engines that exist have it


def found(x: Array, head: QuantisedRows) -> list[int | None]:
    """How many candidates each row has; None where it is not decided."""
    tokens = candidates(x, product(x, half_codes(head), "int8"), head)
    return [None if each is None else len(each) for each in tokens]


def test_the_reference_gives_all_logits() -> None:
    x, head = rows_of(3, K), head_of(400, K)
    inputs: list[Operand | None] = [x, head, half_codes(head), dither(K), head, np.zeros(3, np.int32)]
    attrs: dict[str, Attr] = {"activations": "int8", "group": 0, "product": "", "estimate": ""}
    (y,) = reference(Call(inputs=inputs, attrs=attrs, batch=ONE_TOKEN, kv=[KvCache(LAYOUT, 1)]))
    np.testing.assert_array_equal(y, product(x, head, "int8"))


def test_weights_that_do_not_fit_are_no_use_of_the_op() -> None:
    good = [(K,), (400, K), (400, K), (K,), (500, K), None]
    assert OP.size_problem(good, {}) is None
    for index, shape in ((0, (K + 1,)), (2, (399, K)), (3, (K - 1,)), (4, (399, K)), (4, (400, K - 1)), (4, (K,))):
        assert OP.size_problem([*good[:index], shape, *good[index + 1 :]], {}) is not None


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
def test_what_is_left_has_the_token_of_the_full_product(case: str, k: int) -> None:
    x, head = CASES[case](k)
    full, y = product(x, head, "int8"), screened(x, head)
    np.testing.assert_array_equal(y.argmax(axis=1), full.argmax(axis=1))
    np.testing.assert_array_equal(np.where(np.isneginf(y), full, y), full)
    counts = found(x, head)
    if None in counts:
        np.testing.assert_array_equal(y, full)
    else:
        assert np.isfinite(y).sum(axis=1).tolist() == counts
        assert all(1 <= count <= len(head.scale) // 8 for count in counts if count is not None)


def test_few_candidates_remain_and_the_likeliest_is_not_always_the_best() -> None:
    x, head = rows_of(40, K), head_of(4000, K)
    counts = found(x, head)
    assert None not in counts
    assert np.median([count or 0 for count in counts]) < 200
    likeliest = product(x, half_codes(head), "int8") * STEP
    codes, scales = round_to_int8(x)
    known = np.array([bound(code, 1.0, dither(K))[0] for code in codes])
    likeliest += (scales * known)[:, None] * head.scale
    assert (likeliest.argmax(axis=1) != product(x, head, "int8").argmax(axis=1)).any()


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_not_decided(strange: float) -> None:
    x, head = rows_of(2, K), head_of(400, K)
    x[1, 5] = strange
    assert found(x, head)[1] is None
    head.scale[3] = np.nan
    assert found(x, head) == [None, None]


def test_tiny_and_huge_numbers() -> None:
    for size in (1e-38, 1e-25, 1e25, 1e38):
        x, head = rows_of(4, K), head_of(400, K)
        x = (x / np.abs(x).max() * np.float32(size)).astype(np.float32)
        best = product(x, head, "int8").argmax(axis=1)
        for tokens, one in zip(candidates(x, product(x, half_codes(head), "int8"), head), best, strict=True):
            assert tokens is None or one in tokens, size
