"""The quantiser: near the best level on small rows, each row by itself, and sane on rows of every kind."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from ingot.builder import quantise as quantisation
from ingot.builder.quantise import quantise
from ingot.dtypes import Precision

Array = npt.NDArray[np.float32]

W8, W4 = Precision.parse("w8"), Precision.parse("w4g32")
ALL = [Precision.parse(name) for name in ("w8", "w4g32", "w4g64", "w4g128")]


def random_rows(n: int, k: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_t(5, (n, k)).astype(np.float32)


def error(rows: Array, precision: Precision) -> npt.NDArray[np.float64]:
    """Squared error of each row."""
    left = rows - quantise(rows, precision).values.astype(np.float64)
    return np.asarray((left * left).sum(axis=1))


def signed_absmax(rows: Array, group: int) -> Array:
    """A real scale per group, whose extreme is -8: what the two-level search has to keep up with."""
    groups = rows.reshape(len(rows), -1, group)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1)[..., None], -1)
    step = (extreme / -8).astype(np.float16).astype(np.float32)
    return np.asarray((np.clip(np.rint(groups / step), -8, 7) * step).reshape(rows.shape))


def best_two_level(row: Array, group: int) -> float:
    """Least error over a fine grid of scales and every multiplier, in float64."""
    groups = row.astype(np.float64).reshape(-1, group)
    multipliers = np.array([m for m in range(-15, 16) if m])
    least = np.inf
    for most in np.linspace(5, 20, 200):
        steps = np.abs(row).max() / 8 / most * multipliers
        codes = np.clip(np.rint(groups[:, None, :] / steps[:, None]), -8, 7)
        errors = ((groups[:, None, :] - codes * steps[:, None]) ** 2).sum(axis=-1)
        least = min(least, float(errors.min(axis=1).sum()))
    return least


@pytest.mark.parametrize("seed", range(4))
def test_w4_is_near_the_best_of_brute_force(seed: int) -> None:
    rows = random_rows(4, 96, seed)
    found = error(rows, W4)
    for row, own in zip(rows, found, strict=True):
        assert own < 1.06 * best_two_level(row, 32)


def test_w4_loses_less_than_a_real_scale_per_group_by_its_extreme() -> None:
    rows = random_rows(32, 512)
    for precision in ALL[1:]:
        plain = ((rows - signed_absmax(rows, precision.group)) ** 2).sum()
        assert error(rows, precision).sum() < 0.97 * plain


def test_w8_is_near_the_best_of_a_fine_grid() -> None:
    rows = random_rows(8, 200).astype(np.float64)
    scales = np.abs(rows).max(axis=1) / 127 * np.linspace(0.8, 1.02, 500)[:, None]
    codes = np.clip(np.rint(rows / scales[..., None]), -127, 127)
    best = ((rows - codes * scales[..., None]) ** 2).sum(axis=-1).min(axis=0)
    assert (error(rows.astype(np.float32), W8) < 1.05 * best).all()


@pytest.mark.parametrize("precision", ALL, ids=str)
@pytest.mark.parametrize("k", [1, 20, 130, 172, 300])
def test_ranges_and_shapes(precision: Precision, k: int) -> None:
    """Also K that no group divides, and groups longer than K."""
    rows = random_rows(5, k)
    found = quantise(rows, precision)
    assert found.codes.shape == (5, k)
    assert found.group == precision.group
    if found.multipliers is None:
        assert np.abs(found.codes.astype(int)).max() == 127
    else:
        assert found.multipliers.shape == (5, -(-k // precision.group))
        assert (found.multipliers != 0).all()
        assert np.abs(found.multipliers.astype(int)).max() <= 15
        assert found.codes.min() >= -8
        assert found.codes.max() <= 7
    assert np.abs(found.values - rows).max() < 0.16 * np.abs(rows).max()


@pytest.mark.daily(1)
@pytest.mark.parametrize("precision", ALL, ids=str)
def test_a_row_is_the_same_in_every_company(precision: Precision) -> None:
    rows = random_rows(40, 20_000)[:, :19_990]  # several chunks of work
    together = quantise(rows, precision)
    for number in (0, 13, 39):
        alone = quantise(rows[number : number + 1], precision)
        assert alone.scale[0] == together.scale[number]
        np.testing.assert_array_equal(alone.integers[0], together.integers[number])


@pytest.mark.parametrize("precision", ALL, ids=str)
def test_powers_of_two_change_nothing_but_the_scale(precision: Precision) -> None:
    rows = random_rows(3, 64)
    usual = quantise(rows, precision)
    for power in (-100, 100):
        found = quantise(np.ldexp(rows, power), precision)
        np.testing.assert_array_equal(found.integers, usual.integers)
        np.testing.assert_array_equal(found.scale, np.ldexp(usual.scale, power))


@pytest.mark.parametrize("precision", ALL, ids=str)
def test_zeros_and_values_that_are_not_finite(precision: Precision) -> None:
    rows = random_rows(5, 70)
    rows[1] = 0
    rows[2, 3], rows[3, 4] = np.nan, -np.inf
    rows[4, 32:] = 0
    found = quantise(rows, precision)
    assert not found.values[1].any()
    assert np.isnan(found.scale[2:4]).all()
    assert np.isfinite(found.values[[0, 1, 4]]).all()
    assert not found.values[4, 32:].any()
    assert found.multipliers is None or (found.multipliers != 0).all()


def test_integers_on_the_grid_survive() -> None:
    """Rows that two levels can hold exactly come back exactly, up to the scale's rounding."""
    random = np.random.default_rng(3)
    codes = random.integers(-8, 8, (4, 64))
    codes[:, [0, 32]], codes[:, [1, 33]] = -8, 7
    for signs in itertools.product([1, -1], repeat=2):
        steps = np.repeat(np.array([15, 11]) * np.array(signs), 32)
        rows = (codes * steps * 0.01).astype(np.float32)
        np.testing.assert_allclose(quantise(rows, W4).values, rows, rtol=0, atol=2e-2)


def test_a_group_may_change_its_sign_when_the_scale_has_changed() -> None:
    """8 fits the codes under a negative multiplier alone; the same of -8 and a positive one."""
    values = np.array([[8, 1, -3, 2], [-8, 1, 3, 2]], np.float32)
    groups = quantisation._Groups(values, 4, (-8, 7))
    for present in (1, -1):
        multipliers = np.full(2, present, np.float32)
        found, errors = quantisation._around(groups, np.ones(2, np.float32), multipliers)
        assert found.tolist() == [-1, 1]
        assert not errors.any()


def test_the_scale_that_fits_is_that_of_least_squares() -> None:
    """Two groups of multipliers 3 and -5: sum of (q * x) over sum of q^2, q of both."""
    draw = np.random.default_rng(4)
    multipliers, codes = np.array([3, -5], np.float32), draw.integers(-7, 8, (2, 6))
    q = (codes * multipliers[:, None]).reshape(1, -1)
    rows = (0.5 * q + draw.normal(0, 0.05, q.shape)).astype(np.float32)
    groups = quantisation._Groups(rows, 6, (-8, 7))
    fitted = quantisation._least_squares(groups, np.full(1, 0.5, np.float32), multipliers)
    assert fitted[0] == pytest.approx(float((q * rows).sum() / (q * q).sum()), rel=1e-5)
