"""One matrix: GPTQ beside the textbook's, losses that never grow, codes and scales within what engines keep."""

import gc

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from ingot.builder.calibrated.feedback import Rounded, damped, feedback_of
from ingot.builder.calibrated.levels import EVEN, SHIFTED, UNEVEN, Float32, Levels, search_scales
from ingot.builder.calibrated.methods import Inputs, Wanted, quantise_product, quantise_stack
from ingot.dtypes import DType, Precision, from_float32, round_to_f8
from ingot.plugins.quantised import round_to_int8

N, K, GROUP = 37, 172, 32  # the last group is shorter
ALL = pytest.mark.parametrize("levels", [EVEN, SHIFTED, UNEVEN], ids=["even", "shifted", "uneven"])


def made_up(tokens: int = 700, columns: int = K) -> tuple[Float32, Float32]:
    """(weights [N, columns], inputs [tokens, columns] that go together, some of them loud)"""
    rng = np.random.default_rng(5)
    mix = rng.standard_normal((columns, columns)) * rng.uniform(0.05, 2, columns)
    inputs = rng.standard_normal((tokens, columns)) @ mix
    return (0.1 * rng.standard_normal((N, columns))).astype(np.float32), inputs.astype(np.float32)


def textbook(
    weights: Float32, hessian: npt.NDArray[np.float64], scale: Float32, order: npt.NDArray[np.intp]
) -> Float32:
    """GPTQ by the Cholesky factor of H's inverse, column by column (arXiv:2210.17323, algorithm 1)."""
    left = weights[:, order].astype(np.float64)
    upper = np.linalg.cholesky(np.linalg.inv(hessian[np.ix_(order, order)])).T
    made = np.empty_like(left)
    for i, k in enumerate(order):
        step = scale[:, k // GROUP]
        made[:, i] = np.clip(np.rint(left[:, i] / step), -8, 7) * step
        left[:, i:] -= np.outer((left[:, i] - made[:, i]) / upper[i, i], upper[i, i:])
    return made[:, np.argsort(order)].astype(np.float32)


def test_feedback_is_gptq() -> None:
    weights, x = made_up()
    hessian = damped(x.astype(np.float64).T @ x)
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    scales = search_scales(weights, np.diagonal(hessian).astype(np.float32), GROUP, EVEN)
    found = Rounded.start(weights, scales, EVEN, GROUP)
    found.feed_back(feedback_of(hessian, order), order)
    assert (
        np.abs(weights - found.errors.T - textbook(weights, hessian.astype(np.float64), scales.scale, order)).max()
        < 1e-6
    )


def test_the_factor_of_several_tiles_is_the_triangular_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.builder.calibrated.feedback._TILE", 48)
    _, x = made_up()
    hessian = damped(x.astype(np.float64).T @ x)
    factor = np.triu(feedback_of(hessian, np.arange(K))[::-1, ::-1]).astype(np.float64)
    assert (np.diagonal(factor) == 1).all()
    inverse = np.linalg.inv(factor)
    middle = inverse @ hessian @ inverse.T
    assert np.abs(middle - np.diag(np.diagonal(middle))).max() < 1e-7 * np.abs(hessian).max()


@ALL
def test_each_step_lessens_the_loss(levels: Levels) -> None:
    weights, x = made_up()
    hessian = damped(x.astype(np.float64).T @ x)
    plain = Rounded.start(weights, search_scales(weights, np.ones(K, np.float32), GROUP, levels), levels, GROUP)
    found = Rounded.start(
        weights, search_scales(weights, np.diagonal(hessian).astype(np.float32), GROUP, levels), levels, GROUP
    )
    losses = [plain.losses(hessian).sum(), found.losses(hessian).sum()]
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    found.feed_back(feedback_of(hessian, order), order)
    losses.append(found.losses(hessian).sum())
    for _ in range(2):
        found.sweep(hessian)
        losses.append(found.losses(hessian).sum())
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < 0.6 * losses[0]


@ALL
def test_a_fold_is_that_of_weights_and_inputs(levels: Levels) -> None:
    """H and its factor are of the inputs themselves: codes are those of W * s and of inputs over s."""
    weights, x = made_up()
    hessian = damped(x.astype(np.float64).T @ x)
    fold = np.exp2(np.arange(K) % 5 - 2).astype(np.float32)  # powers of two: nothing is rounded otherwise
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    found = []
    for rows, squares, inner in ((weights, hessian, fold), (weights * fold, hessian / np.outer(fold, fold), None)):
        scales = search_scales(weights * fold, np.ones(K, np.float32), GROUP, levels)
        each = Rounded.start(rows, scales, levels, GROUP, inner)
        each.feed_back(feedback_of(squares, order), order)
        found.append((each, each.sweep(squares, 2)))
    (inside, losses), (outside, expected) = found
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert (inside.codes == outside.codes).mean() > 0.999
    np.testing.assert_allclose(inside.errors * fold[:, None], outside.errors, atol=1e-3)


@pytest.mark.parametrize("group", [8, GROUP, 100, K])
def test_a_sweep_knows_the_losses_it_leaves(group: int) -> None:
    weights, x = made_up()
    hessian = damped(x.astype(np.float64).T @ x)
    found = Rounded.start(weights, search_scales(weights, np.ones(K, np.float32), group, EVEN), EVEN, group)
    losses = [found.losses(hessian)]
    for _ in range(3):
        losses.append(found.sweep(hessian))
        errors = found.errors.astype(np.float64)
        np.testing.assert_allclose(losses[-1], np.einsum("kn,kl,ln->n", errors, hessian, errors), rtol=2e-4)
        assert (losses[-1] <= losses[-2] * 1.0001).all(), "of each row"


def test_what_a_block_of_rows_needs_is_freed_with_it() -> None:
    """Reference counts alone free it: the collector of cycles may come late."""
    weights, x = made_up()
    hessian = damped(x.astype(np.float64).T @ x)
    found = Rounded.start(weights, search_scales(weights, np.ones(K, np.float32), GROUP, EVEN), EVEN, GROUP)
    gc.collect()
    gc.disable()
    try:
        found.feed_back(feedback_of(hessian, np.arange(K)), np.arange(K))
        found.sweep(hessian, 2)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_nearest_of_a_table_is_the_nearest() -> None:
    table = np.array(UNEVEN.table, np.float32)
    ratios = np.concatenate([np.arange(-300, 300) / 2, np.random.default_rng(1).uniform(-200, 200, 999), [1e30, -1e30]])
    expected = table[np.abs(np.clip(ratios, -999, 999)[:, None] - table).argmin(axis=1)]  # the lower one of two
    np.testing.assert_array_equal(UNEVEN.nearest(ratios.astype(np.float32), None), expected)


def test_some_rows_of_a_large_weight_choose_the_way_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = made_up(columns=64)
    draw = np.random.default_rng(8)
    many = np.concatenate([weights + 0.01 * draw.standard_normal(weights.shape).astype(np.float32) for _ in range(8)])
    many = many.astype(np.float32)
    wanted, inputs, numbers = Wanted.of("w4g32", "auto", 64), Inputs([x], 64), np.arange(64)
    whole = quantise_product(lambda begin, end: many[begin:end], len(many), inputs, wanted, numbers)
    fed, feed_back = list[int](), Rounded.feed_back

    def noted(self: Rounded, factor: Float32, order: npt.NDArray[np.intp]) -> None:
        fed.append(self.weights.shape[1])
        feed_back(self, factor, order)

    monkeypatch.setattr(Rounded, "feed_back", noted)
    monkeypatch.setattr("ingot.builder.calibrated.methods._CHOOSING", 64)
    chosen = quantise_product(lambda begin, end: many[begin:end], len(many), inputs, wanted, numbers)
    assert fed == [64] * 4 + [len(many)], "two sets of levels, with a fold and without"
    assert (chosen.method, chosen.levels, chosen.loss) == (whole.method, whole.levels, whole.loss)
    np.testing.assert_array_equal(chosen.codes, whole.codes)


@pytest.mark.parametrize("codes", ["auto", "symmetric", "asymmetric"])
def test_the_best_is_never_worse_than_the_nearest_and_codes_fit(codes: str) -> None:
    weights, x = made_up(columns=128)
    wanted = Wanted.of("w4g32", codes, 128)
    found = quantise_product(
        lambda begin, end: weights[begin:end], N, Inputs([x[:300], x[300:]], 128), wanted, np.arange(128)
    )
    lost = x @ (weights - found.rows(0, N)).T
    assert float((lost * lost).sum()) <= found.loss * 1.001  # whose inputs are damped
    assert found.loss < found.plain
    assert found.energy == pytest.approx(float(((x @ weights.T) ** 2).sum()), rel=0.05)
    low, high = (0, 15) if found.levels.lowest == 0 else (-8, 7)
    assert low <= found.codes.min() <= found.codes.max() <= high
    half = found.scales.scale / np.float32(2.0 ** np.floor(np.log2(np.abs(found.scales.scale).max())))
    np.testing.assert_array_equal(half.astype(np.float16).astype(np.float32), half)


@pytest.mark.daily(1)
@pytest.mark.parametrize("precision", ["w4g32", "w8", "f8", "w8a8"])
@pytest.mark.parametrize("codes", ["symmetric", "asymmetric"])
def test_each_way_loses_less_than_the_one_before(precision: str, codes: str) -> None:
    weights, x = made_up()
    ways = [("plain",), ("nearest",), ("gptq",), ("nearest", "gptq", "folded")]
    found = [
        quantise_product(
            lambda begin, end: weights[begin:end], N, Inputs([x], K), Wanted.of(precision, codes, K, each), np.arange(K)
        )
        for each in ways
    ]
    assert [each.method for each in found][:3] == ["plain", "nearest", "gptq"]
    losses = [each.loss for each in found]
    assert losses[0] > losses[2] >= losses[3] * (1 - 1e-12)  # the same codes may round to another last bit
    assert found[1].loss == found[0].plain
    assert precision == "f8" or losses[0] > losses[1] > losses[2]


def test_fp8_levels_are_those_of_the_format() -> None:
    draw = np.random.default_rng(2)
    values = np.concatenate([draw.normal(0, scale, 4000) for scale in (1e-3, 0.1, 30)]).astype(np.float32)
    values = np.concatenate([values, [0, 448, -448, 2**-9, 2**-10, 1.5 * 2**-9, 1.0625, 1.1875]]).astype(np.float32)
    expected = values.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(from_float32(values, DType.F8), expected.view(np.uint8))
    np.testing.assert_array_equal(round_to_f8(values), expected.astype(np.float32))
    assert from_float32(np.array([1e9, np.nan], np.float32), DType.F8).tolist() == [0x7E, 0x7F]


def test_smoothing_is_for_int8_inputs() -> None:
    """One column is a hundred times as loud: its share moves into the weights."""
    weights, _ = made_up(columns=64)
    x = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    x[:, 7] *= 100
    read, inputs = (lambda begin, end: weights[begin:end]), Inputs([x], 64)
    plain = quantise_product(read, N, inputs, Wanted.of("w8a8", "auto", 64), None)
    folded = quantise_product(read, N, inputs, Wanted.of("w8a8", "auto", 64), np.arange(64))
    assert plain.fold is None
    assert folded.fold is not None
    assert folded.loss < 0.2 * plain.loss
    codes, scale = round_to_int8(x / folded.fold)
    lost = x @ weights.T - codes * scale[:, None] * folded.fold @ folded.rows(0, N).T
    assert float((lost * lost).sum()) == pytest.approx(folded.loss, rel=1e-3)


def test_experts_share_levels_and_one_that_saw_nothing_is_made_too() -> None:
    weights, x = made_up(columns=64)
    stack = np.concatenate([weights, 3 * weights])
    found = quantise_stack(
        lambda begin, end: stack[begin:end],
        N,
        2,
        lambda expert: Inputs([x] if expert == 0 else [], 64),
        Wanted.of("w4g32", "auto", 64),
    )
    assert len({each.levels for each in found}) == 1
    assert np.abs(found[1].rows(0, N) - 3 * weights).max() < 0.1
    assert Precision.parse("w4g32").group == found[0].group


def test_silent_inputs_and_rows_of_zeros_give_numbers() -> None:
    weights, x = made_up(columns=64)
    weights[3] = 0
    x[:, 5] = 0
    found = quantise_product(
        lambda begin, end: weights[begin:end], N, Inputs([x], 64), Wanted.of("w4g32", "asymmetric", 64), np.arange(64)
    )
    values = found.rows(0, N)
    assert np.isfinite(values).all()
    assert not values[3].any()
