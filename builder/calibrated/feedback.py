"""Rounding that makes up for itself: what one column loses, later columns take back, as far as inputs go together.

H [K, K] is the sum of x x^T over the inputs of a product, with a little added to its diagonal. The loss of a row is
e H e^T, where e is what rounding changed.

    GPTQ    columns in turn, loud ones first: column k is rounded from w[k] + e[before] @ M[before, k], where
            H = M D M^T, M unit upper triangular (Frantar et al., arXiv:2210.17323, in the form of LDLQ, Chee et al.,
            arXiv:2307.13304, which is the same)
    sweeps  each column again, as all others are now; then each group's scale, in least squares. Both only lessen
            the loss

Arrays are [K, rows] here, so that a column lies together.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from ingot.builder.calibrated.levels import Float32, Levels, Scales, round_scale

Floats = npt.NDArray[np.floating]

DAMPING = 0.01  # of the mean diagonal
_BLOCK = 128  # columns that take the errors of all others in one product
_TILE = 512  # of the factorisation


def damped(hessian: Floats) -> Floats:
    """H in place, made positive: a little is added to its diagonal, 1 where inputs were always zero."""
    diagonal = np.einsum("kk->k", hessian)
    silent = diagonal <= 0
    mean = float(diagonal.mean())
    diagonal += DAMPING * mean
    diagonal[silent] += mean if mean > 0 else 1
    return hessian


def feedback_of(hessian: Floats) -> Floats:
    """M of a damped H, in its place: unit upper triangular; below the diagonal is nothing of meaning."""
    factor = hessian[::-1, ::-1]  # the other way round, M is the lower factor
    k = len(factor)
    for begin in range(0, k, _TILE):
        end = min(begin + _TILE, k)
        corner = np.linalg.cholesky(factor[begin:end, begin:end])
        factor[begin:end, begin:end] = corner
        if end < k:
            factor[end:, begin:end] = np.linalg.solve(corner, factor[end:, begin:end].T).T
            for row in range(end, k, _TILE):
                stop = min(row + _TILE, k)
                factor[row:stop, end:stop] -= factor[row:stop, begin:end] @ factor[end:stop, begin:end].T
    factor /= np.einsum("kk->k", factor).copy()
    return hessian


@dataclasses.dataclass(kw_only=True)
class Rounded:
    """Columns on their way. weights, levels: float32 [K, rows]; scale, zero: [groups, rows]."""

    weights: Float32
    levels: Float32
    scale: Float32
    zero: Float32 | None
    grid: Levels
    group: int

    @classmethod
    def start(cls, weight_rows: Float32, scales: Scales, grid: Levels, group: int) -> "Rounded":
        """Every weight of rows [n, K] rounded to the nearest level."""
        weights = np.ascontiguousarray(weight_rows.T)
        zero = None if scales.zero is None else np.ascontiguousarray(scales.zero.T)
        made = cls(
            weights=weights,
            levels=np.empty_like(weights),
            scale=np.ascontiguousarray(scales.scale.T),
            zero=zero,
            grid=grid,
            group=group,
        )
        for k in range(len(weights)):
            made._round(k, weights[k])
        return made

    @property
    def errors(self) -> Float32:
        """w - what it is rounded to, [K, rows]."""
        spread = np.repeat(self.scale, self.group, axis=0)[: len(self.weights)]
        return self.weights - self.levels * spread

    @property
    def codes(self) -> npt.NDArray[np.int8]:
        """As they are stored, [K, rows]."""
        zero = None if self.zero is None else np.repeat(self.zero, self.group, axis=0)[: len(self.levels)]
        return self.grid.codes(self.levels, zero)

    def losses(self, hessian: Floats) -> npt.NDArray[np.float64]:
        """e H e^T of each row."""
        errors = self.errors
        found: npt.NDArray[np.float64] = np.einsum("kn,kn->n", hessian @ errors, errors, dtype=np.float64)
        return found

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
        """GPTQ. factor: M of H with its columns in this order."""
        errors = np.zeros_like(self.weights)  # in the order
        for begin in range(0, len(order), _BLOCK):
            end = min(begin + _BLOCK, len(order))
            taken = factor[:begin, begin:end].T.astype(np.float32) @ errors[:begin]
            own = factor[begin:end, begin:end].astype(np.float32)
            for i in range(end - begin):
                k = order[begin + i]
                target = self.weights[k] + taken[i] + own[:i, i] @ errors[begin : begin + i]
                errors[begin + i] = self.weights[k] - self._round(k, target)

    def sweep(self, hessian: Floats) -> None:
        """Round each column again under the present ones, then fit the scales."""
        errors = self.errors
        for begin in range(0, len(errors), _BLOCK):
            end = min(begin + _BLOCK, len(errors))
            pulls = hessian[begin:end].astype(np.float32) @ errors
            own = hessian[begin:end, begin:end].astype(np.float32)
            for i in range(end - begin):
                k = begin + i
                target = self.weights[k] - errors[k] + pulls[i] / own[i, i]
                found = self.weights[k] - self._round(k, target)
                pulls += own[:, i, None] * (found - errors[k])
                errors[k] = found
        self._fit(hessian, errors)

    def _fit(self, hessian: Floats, errors: Float32) -> None:
        for j in range(len(self.scale)):
            part = np.s_[j * self.group : (j + 1) * self.group]
            levels, own = self.levels[part], hessian[part, part].astype(np.float32)
            along = np.einsum("kn,kn->n", hessian[part].astype(np.float32) @ errors, levels)
            squares = np.einsum("kn,kn->n", own @ levels, levels)
            change = np.where(squares > 0, along / np.where(squares > 0, squares, 1), np.float32(0))
            fitted = round_scale(self.scale[j] + change)
            # rounding the scale may cost more than the step gains
            gains = np.abs(fitted - self.scale[j] - change) < np.abs(change)
            fitted = np.where(gains, fitted, self.scale[j])
            errors[part] -= levels * (fitted - self.scale[j])
            self.scale[j] = fitted

    def _round(self, k: int, target: Float32) -> Float32:
        """Give column k the levels nearest to a target; returns what they stand for."""
        scale = self.scale[k // self.group]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = np.where(scale != 0, target / scale, np.float32(0))
        self.levels[k] = self.grid.nearest(ratios, None if self.zero is None else self.zero[k // self.group])
        found: Float32 = self.levels[k] * scale
        return found
