"""Rounding that makes up for itself: what one column loses, later columns take back, as far as inputs go together.

H [K, K] is the sum of x x^T over the inputs of a product, with a little added to its diagonal. The loss of a row is
e H e^T, where e is what rounding changed.

    GPTQ    columns in turn, loud ones first: column k is rounded from w[k] + e[before] @ M[before, k], where
            H = M D M^T, M unit upper triangular (Frantar et al., arXiv:2210.17323, in the form of LDLQ, Chee et al.,
            arXiv:2307.13304, which is the same)
    sweeps  each column again, as all others are now; then each group's scale, in least squares. Both only lessen
            the loss

A fold s changes what a column can be rounded to, level * scale / s, and nothing else: neither H nor M is made again.

Arrays are [K, rows] here, so that a column lies together. Work of K^2 numbers per row is done in products of matrices:
a range of columns is halved, and the half that comes second takes at once what all of the first half lost.

    GPTQ        rows * K^2 operations
    a loss      the same
    sweeps      twice that each, and once before the first
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from ingot.builder.calibrated.levels import Float32, Levels, Scales, round_scale

Floats = npt.NDArray[np.floating]

DAMPING = 0.01  # of the mean diagonal
_STRIP = 16  # columns that are not halved any more
_TILE = 512  # of the factorisation, and of losses


def damped(hessian: Floats) -> Floats:
    """H in place, made positive: a little is added to its diagonal, 1 where inputs were always zero."""
    diagonal = np.einsum("kk->k", hessian)
    silent = diagonal <= 0
    mean = float(diagonal.mean())
    diagonal += DAMPING * mean
    diagonal[silent] += mean if mean > 0 else 1
    return hessian


def feedback_of(hessian: Floats, order: npt.NDArray[np.intp]) -> Floats:
    """M of a damped H with its columns in this order, back to front: unit lower triangular; above the diagonal is
    nothing of meaning."""
    backwards = order[::-1]
    factor = hessian[np.ix_(backwards, backwards)]
    k = len(factor)
    for begin in range(0, k, _TILE):
        end = min(begin + _TILE, k)
        corner = np.linalg.cholesky(factor[begin:end, begin:end])
        factor[begin:end, begin:end] = corner
        if end < k:
            below = np.ascontiguousarray(factor[end:, begin:end]) @ np.linalg.inv(corner).T
            factor[end:, begin:end] = below
            for row in range(end, k, _TILE):
                stop = min(row + _TILE, k)
                factor[row:stop, end:stop] -= below[row - end : stop - end] @ below[: stop - end].T
    factor /= np.einsum("kk->k", factor).copy()
    return factor


def squares_of(hessian: Floats, errors: Float32) -> npt.NDArray[np.float64]:
    """e H e^T of each column e of errors [K, rows], from the half of H below its diagonal."""
    total = np.zeros(errors.shape[1])
    for begin in range(0, len(errors), _TILE):
        end = min(begin + _TILE, len(errors))
        own = errors[begin:end]
        pulls = _single(hessian[begin:end, begin:end]) @ own
        if begin:
            pulls += 2 * (_single(hessian[begin:end, :begin]) @ errors[:begin])
        total += _dots(pulls, own)
    return total


def _single(part: Floats) -> Float32:
    return part.astype(np.float32, copy=False)


def _dots(a: Float32, b: Float32) -> npt.NDArray[np.float64]:
    """Column by column: the sum of products of two matrices."""
    found: npt.NDArray[np.float64] = np.multiply(a, b).sum(axis=0, dtype=np.float64)
    return found


@dataclasses.dataclass(kw_only=True)
class Rounded:
    """Columns on their way. weights, levels: float32 [K, rows]; scale, zero: [groups, rows]; fold: [K]."""

    weights: Float32
    levels: Float32
    scale: Float32
    zero: Float32 | None
    fold: Float32 | None
    grid: Levels
    group: int

    @classmethod
    def start(
        cls, weight_rows: Float32, scales: Scales, grid: Levels, group: int, fold: Float32 | None = None
    ) -> "Rounded":
        """Every weight of rows [n, K] rounded to the nearest level. scales: of the rows times the fold."""
        weights = np.ascontiguousarray(weight_rows.T)
        zero = None if scales.zero is None else np.ascontiguousarray(scales.zero.T)
        made = cls(
            weights=weights,
            levels=np.empty_like(weights),
            scale=np.ascontiguousarray(scales.scale.T),
            zero=zero,
            fold=fold,
            grid=grid,
            group=group,
        )
        steps = made.steps()
        for k in range(len(weights)):
            made.round(k, weights[k].copy(), steps)
        return made

    @property
    def errors(self) -> Float32:
        """w - what it is rounded to, [K, rows]."""
        found = np.repeat(self.scale, self.group, axis=0)[: len(self.weights)]
        found *= self.levels
        if self.fold is not None:
            found /= self.fold[:, None]
        return np.subtract(self.weights, found, out=found)

    @property
    def codes(self) -> npt.NDArray[np.int8]:
        """As they are stored, [K, rows]."""
        zero = None if self.zero is None else np.repeat(self.zero, self.group, axis=0)[: len(self.levels)]
        return self.grid.codes(self.levels, zero)

    def losses(self, hessian: Floats) -> npt.NDArray[np.float64]:
        """e H e^T of each row."""
        return squares_of(hessian, self.errors)

    def copy(self) -> "Rounded":
        """That goes its own way; zero points never change."""
        return dataclasses.replace(self, levels=self.levels.copy(), scale=self.scale.copy())

    def adopt(self, other: "Rounded", weight_rows: npt.NDArray[np.bool_]) -> None:
        """Some rows from another of the same weights."""
        self.levels[:, weight_rows], self.scale[:, weight_rows] = (
            other.levels[:, weight_rows],
            other.scale[:, weight_rows],
        )

    def feed_back(self, factor: Floats, order: npt.NDArray[np.intp]) -> None:
        """GPTQ. factor: M of H with its columns in this order, back to front."""
        backwards = order[::-1]
        targets, errors = self.weights[backwards], np.empty_like(self.weights)
        feedback = _FeedBack(self, factor=factor, order=backwards, steps=self.steps(), targets=targets, errors=errors)
        feedback.round_columns(0, len(order))

    def sweep(self, hessian: Floats, times: int = 1) -> npt.NDArray[np.float64]:
        """Round each column again under the present ones, and fit a group's scales when its columns are done. Returns
        the losses of rows."""
        errors = self.errors
        pulls, changes = _single(hessian) @ errors, np.empty_like(errors)
        for _ in range(times):
            sweep = _Sweep(self, hessian=hessian, steps=self.steps(), errors=errors, pulls=pulls, changes=changes)
            sweep.round_columns(0, len(errors))
        return _dots(errors, pulls)

    def steps(self) -> Float32:
        """Scales to divide by: a group of zeros stays zeros."""
        return np.where(self.scale != 0, self.scale, np.float32(np.inf))

    def round(self, k: int, target: Float32, steps: Float32) -> Float32:
        """Give column k the levels nearest to a target, in whose place is then what they stand for."""
        j = k // self.group
        step, zero = steps[j], None
        if self.fold is not None:
            step = step / self.fold[k]
        if self.zero is not None:
            zero = self.zero[j]
        with np.errstate(over="ignore"):
            target /= step
        found = self.levels[k] = self.grid.nearest(target, zero)
        np.multiply(self.scale[j], found, out=target)
        if self.fold is not None:
            target /= self.fold[k]
        return target


@dataclasses.dataclass(frozen=True)
class _FeedBack:
    """Columns in their order, back to front. targets: what they are rounded from, as far as it is known."""

    rounded: Rounded
    _: dataclasses.KW_ONLY
    factor: Floats
    order: npt.NDArray[np.intp]
    steps: Float32
    targets: Float32
    errors: Float32

    def round_columns(self, begin: int, end: int) -> None:
        """Round columns [begin, end), whose targets have what all columns behind them lost."""
        if end - begin > _STRIP:
            middle = (begin + end) // 2
            self.round_columns(middle, end)
            self.targets[begin:middle] += _single(self.factor[middle:end, begin:middle]).T @ self.errors[middle:end]
            self.round_columns(begin, middle)
            return
        own, rounded = _single(self.factor[begin:end, begin:end]), self.rounded
        for i in reversed(range(begin, end)):
            if i + 1 < end:
                self.targets[i] += own[i + 1 - begin :, i - begin] @ self.errors[i + 1 : end]
            k = self.order[i]
            np.subtract(rounded.weights[k], rounded.round(k, self.targets[i], self.steps), out=self.errors[i])


@dataclasses.dataclass(frozen=True)
class _Sweep:
    """Each column once. pulls: H e of the present e; changes: of e, in this sweep."""

    rounded: Rounded
    _: dataclasses.KW_ONLY
    hessian: Floats
    steps: Float32
    errors: Float32
    pulls: Float32
    changes: Float32

    def round_columns(self, begin: int, end: int) -> None:
        """Columns [begin, end), and the scales of groups that end with them; their own pulls are right again then."""
        group, hessian, pulls, changes = self.rounded.group, self.hessian, self.pulls, self.changes
        first, last = begin // group, (end - 1) // group
        if first < last or end - begin > _STRIP:
            middle = (begin + end) // 2 if first == last else (first + last + 1) // 2 * group
            self.round_columns(begin, middle)
            pulls[middle:end] += _single(hessian[middle:end, begin:middle]) @ changes[begin:middle]
            self.round_columns(middle, end)
            pulls[begin:middle] += _single(hessian[begin:middle, middle:end]) @ changes[middle:end]
        else:
            self._round(begin, end)
        if (begin, end) == (first * group, min((first + 1) * group, len(self.errors))):
            self._fit(first)

    def _round(self, begin: int, end: int) -> None:
        own, weights = _single(self.hessian[begin:end, begin:end]), self.rounded.weights
        for k in range(begin, end):
            i = k - begin
            pull = self.pulls[k] + own[i, :i] @ self.changes[begin:k] if i else self.pulls[k].copy()
            pull /= own[i, i]
            pull -= self.errors[k]
            pull += weights[k]
            found = np.subtract(weights[k], self.rounded.round(k, pull, self.steps), out=pull)
            np.subtract(found, self.errors[k], out=self.changes[k])
            self.errors[k] = found
        self.pulls[begin:end] += own @ self.changes[begin:end]

    def _fit(self, j: int) -> None:
        """The scale of group j in least squares."""
        rounded = self.rounded
        part = slice(j * rounded.group, (j + 1) * rounded.group)
        levels = rounded.levels[part]
        if rounded.fold is not None:
            levels = levels / rounded.fold[part, None]
        pulled = _single(self.hessian[part, part]) @ levels
        along, squares = (np.einsum("kn,kn->n", each, levels) for each in (self.pulls[part], pulled))
        change = np.where(squares > 0, along / np.where(squares > 0, squares, 1), np.float32(0))
        fitted = round_scale(rounded.scale[j] + change)
        # rounding the scale may cost more than the step gains
        gains = np.abs(fitted - rounded.scale[j] - change) < np.abs(change)
        step = np.where(gains, fitted - rounded.scale[j], np.float32(0))
        rounded.scale[j] += step
        self.pulls[part] -= pulled * step
        moved = levels * step
        self.errors[part] -= moved
        self.changes[part] -= moved
