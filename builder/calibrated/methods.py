"""One product's weight, quantised in several ways on its own inputs; the way that loses least stays.

    plain      each weight to the nearest level, under scales that hold the largest one: to compare with
    nearest    the same under scales that fit the weights best
    gptq       scales that fit where inputs are loud, with errors fed back and sweeps where a row gains by it
    folded     any of these of W * s, where inputs become x / s: loud columns take finer steps (AWQ, arXiv:2306.00978;
               with int8 inputs SmoothQuant, arXiv:2211.10438). Only where something before the product takes 1 / s

The loss is that of the product's outputs on the calibration text, over these outputs: sqrt(sum |x e|^2 / sum |x w|^2).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ingot.builder.calibrated.feedback import Floats, Rounded, damped, feedback_of
from ingot.builder.calibrated.levels import (
    BYTES,
    E4M3,
    EVEN,
    SHIFTED,
    UNEVEN,
    Float32,
    Levels,
    Scales,
    largest_scales,
    search_scales,
)
from ingot.configs.quantize import WAYS
from ingot.plugins.quantised import round_to_int8

ROWS = 1024  # of a weight worked on at a time
SWEEPS = 3
_DOUBLE_UP_TO = 8192  # columns: H of more is float32, half as large
_TRIED = 256  # rows that choose a fold
_FOLDS = (0.25, 0.5, 0.75)  # powers of the loudness of inputs
_KEPT = np.float32(0.1)  # of the median fold, at least: what was silent here may be loud elsewhere

ReadRows = Callable[[int, int], Float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """levels: those to try. group: columns that share a scale. int8_inputs: whether the loss is with inputs rounded
    to int8."""

    levels: tuple[Levels, ...]
    group: int
    int8_inputs: bool = False
    ways: Sequence[str] = WAYS

    @classmethod
    def of(cls, precision: str, codes: str, columns: int, ways: Sequence[str] = WAYS) -> "Wanted":
        """precision: w8, w8a8, f8 or w4gG; codes: auto, symmetric or asymmetric; ways: those to try."""
        if not precision.startswith("w4"):
            levels = E4M3 if precision == "f8" else BYTES
            return cls(levels=(levels,), group=columns, int8_inputs=precision == "w8a8", ways=ways)
        group = min(int(precision.removeprefix("w4g")), columns)
        # a table's groups are reshaped in the Graph, so none may be shorter
        tables = (UNEVEN,) if codes == "auto" and columns % group == 0 else ()
        return cls(levels=(SHIFTED,) if codes == "asymmetric" else (EVEN, *tables), group=group, ways=ways)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A weight [N, K] quantised.

    codes     int8 [N, K]
    scales    of its groups
    fold      float32 [K]: the codes are of W * fold; None: of W
    method    for people
    loss      sum of squares of what outputs lose
    plain     the same of rounding to the nearest
    energy    sum of squares of the outputs
    """

    codes: npt.NDArray[np.int8]
    scales: Scales
    levels: Levels
    group: int
    fold: Float32 | None
    method: str
    loss: float
    plain: float
    energy: float

    def rows(self, begin: int, end: int) -> Float32:
        """Values [end - begin, K] of the weight itself."""
        codes = self.codes[begin:end]
        numbers, k = self.levels.values(codes), codes.shape[1]
        if self.scales.zero is not None:
            numbers -= np.repeat(self.scales.zero[begin:end], self.group, axis=1)[:, :k]
        numbers *= np.repeat(self.scales.scale[begin:end], self.group, axis=1)[:, :k]
        return numbers if self.fold is None else numbers / self.fold


class Inputs:
    """What a product's weight was multiplied with, [tokens, K] in parts."""

    def __init__(self, parts: Sequence[Float32], columns: int) -> None:
        self.parts, self.columns = parts, columns

    @property
    def count(self) -> int:
        return sum(map(len, self.parts))

    def loudness(self, largest: bool) -> Float32:
        """Mean magnitude by column, or the largest."""
        if not self.count:
            return np.ones(self.columns, np.float32)
        if largest:
            return np.asarray(np.max([np.abs(part).max(axis=0, initial=0) for part in self.parts], axis=0), np.float32)
        return np.asarray(sum(np.abs(part).sum(axis=0) for part in self.parts) / self.count, np.float32)

    def squares(self) -> Floats:
        """H: sum of x x^T."""
        kind = _kind_of_squares(self.columns)
        total: Floats = np.zeros((self.columns, self.columns), kind)
        for part in self.parts:
            for begin in range(0, len(part), ROWS):
                x: Floats = part[begin : begin + ROWS].astype(kind, copy=False)
                total += x.T @ x
        return total

    def int8_loss(self, read: ReadRows, found: "Found") -> float:
        """Sum of squares of what outputs lose with inputs, folded as the weight is, rounded to int8."""
        loss, fold = 0.0, np.float32(1) if found.fold is None else found.fold
        for part in self.parts:
            codes, scale = round_to_int8(part / fold)
            rounded = codes * scale[:, None] * fold
            for begin in range(0, len(found.codes), ROWS):
                end = min(begin + ROWS, len(found.codes))
                lost = part @ read(begin, end).T - rounded @ found.rows(begin, end).T
                loss += float(np.einsum("tn,tn->", lost, lost, dtype=np.float64))
        return loss


def _kind_of_squares(columns: int) -> np.dtype[np.floating]:
    return np.dtype(np.float64 if columns <= _DOUBLE_UP_TO else np.float32)


def squares_memory(columns: int) -> int:
    """Bytes of one H."""
    return columns * columns * _kind_of_squares(columns).itemsize


def quantise_product(
    read: ReadRows, weight_rows: int, inputs: Inputs, wanted: Wanted, tied: npt.NDArray[np.intp] | None
) -> Found:
    """The best of all ways. read: rows [begin, end) of the weight as float32. tied: the number of the factor that each
    column takes in a fold; None: there is no fold."""
    hessian = damped(inputs.squares())
    energy = sum(float(np.einsum("nk,nk->", (w @ hessian), w, dtype=np.float64)) for w in _blocks(read, weight_rows))
    nearest = _measured(_nearest(read, weight_rows, hessian, wanted), read, inputs, wanted)
    tried = [nearest] if "nearest" in wanted.ways else []
    if "plain" in wanted.ways:
        tried.append(_measured(_nearest(read, weight_rows, hessian, wanted, plain=True), read, inputs, wanted))
    foldable = tied if "folded" in wanted.ways else None
    found = [] if foldable is None else list(_folds(read, weight_rows, inputs, wanted, foldable))
    unfolded = () if not {"gptq", "folded"} & {*wanted.ways} else (None,)
    for fold in (*unfolded, *_promising(found, read, weight_rows, hessian, inputs, wanted)):
        with _of_folded(hessian, fold):
            made = _measured(_ways(read, weight_rows, hessian, wanted, fold), read, inputs, wanted)
        tried = [min([*tried, made], key=lambda each: each.loss)]
    best = min(tried, key=lambda each: each.loss)
    return dataclasses.replace(best, plain=nearest.loss, energy=energy)


def _promising(
    folds: Sequence[Float32], read: ReadRows, weight_rows: int, hessian: Floats, inputs: Inputs, wanted: Wanted
) -> list[Float32]:
    """The fold under which some rows, rounded to the nearest, lose least: feeding errors back takes far longer."""
    few, levels, losses = min(weight_rows, _TRIED), wanted.levels[0], list[float]()
    for fold in folds:
        with _of_folded(hessian, fold):
            weights, diagonal = read(0, few) * fold, np.einsum("kk->k", hessian).astype(np.float32)
            scales = search_scales(weights, diagonal, wanted.group, levels)
            tried = _gathered([Rounded.start(weights, scales, levels, wanted.group)], hessian, fold, "")
        losses.append(_measured(tried, read, inputs, wanted).loss)
    return [] if not folds else [folds[int(np.argmin(losses))]]


@contextlib.contextmanager
def _of_folded(hessian: Floats, fold: Float32 | None) -> Iterator[None]:
    """H of inputs divided by a fold, in the place of H: a copy would be as large as all else together."""
    if fold is not None:
        hessian /= fold[:, None]
        hessian /= fold
    yield
    if fold is not None:
        hessian *= fold[:, None]
        hessian *= fold


def _measured(found: Found, read: ReadRows, inputs: Inputs, wanted: Wanted) -> Found:
    """With the loss that counts."""
    return dataclasses.replace(found, loss=inputs.int8_loss(read, found)) if wanted.int8_inputs else found


def quantise_stack(
    read: ReadRows, weight_rows: int, experts: int, inputs: Callable[[int], Inputs], wanted: Wanted
) -> list[Found]:
    """The matrices of experts, `weight_rows` each, all under the same levels."""
    made = (
        [
            quantise_product(
                lambda begin, end, first=expert * weight_rows: read(first + begin, first + end),  # type: ignore[misc]
                weight_rows,
                inputs(expert),
                dataclasses.replace(wanted, levels=(levels,)),
                None,
            )
            for expert in range(experts)
        ]
        for levels in wanted.levels
    )
    return min(made, key=lambda each: sum(found.loss for found in each))


def _blocks(read: ReadRows, weight_rows: int) -> Iterator[Float32]:
    for begin in range(0, weight_rows, ROWS):
        yield read(begin, min(begin + ROWS, weight_rows))


def _folds(
    read: ReadRows, weight_rows: int, inputs: Inputs, wanted: Wanted, tied: npt.NDArray[np.intp]
) -> Iterator[Float32]:
    """Factors of columns, whose geometric mean is 1."""
    loud = _largest(inputs.loudness(wanted.int8_inputs), tied)
    heavy = _largest(np.max([np.abs(block).max(axis=0) for block in _blocks(read, weight_rows)], axis=0), tied)
    for power in _FOLDS:
        fold = loud**power / np.maximum(heavy, np.float32(1e-9)) ** (1 - power) if wanted.int8_inputs else loud**power
        fold = np.maximum(fold, _KEPT * np.median(fold)).astype(np.float32)
        if np.isfinite(fold).all() and fold.min() > 0:
            yield (fold / np.float32(np.exp(np.log(fold).mean())))[tied]


def _largest(values: Float32, tied: npt.NDArray[np.intp]) -> Float32:
    """The largest value among the columns that share a factor."""
    found = np.zeros(int(tied.max()) + 1, np.float32)
    np.maximum.at(found, tied, values)
    return found


def _nearest(read: ReadRows, weight_rows: int, hessian: Floats, wanted: Wanted, *, plain: bool = False) -> Found:
    """What is made without any regard to inputs."""
    even, levels, group = np.ones(len(hessian), np.float32), wanted.levels[0], wanted.group

    def make(block: Float32) -> Rounded:
        scales = largest_scales(block, group, levels) if plain else search_scales(block, even, group, levels)
        return Rounded.start(block, scales, levels, group)

    return _gathered(map(make, _blocks(read, weight_rows)), hessian, None, "plain" if plain else "nearest")


def _ways(read: ReadRows, weight_rows: int, hessian: Floats, wanted: Wanted, fold: Float32 | None) -> Found:
    """The best set of levels, errors fed back. hessian: of the inputs of W * fold, damped."""
    diagonal = np.einsum("kk->k", hessian).astype(np.float32)
    order = np.argsort(-diagonal, kind="stable")
    factor = feedback_of(hessian[np.ix_(order, order)])

    def make(block: Float32, levels: Levels) -> Rounded:
        """Errors fed back where a row gains by it."""
        weights = block if fold is None else block * fold
        found = Rounded.start(weights, search_scales(weights, diagonal, wanted.group, levels), levels, wanted.group)
        weighted = found.copy()
        found.feed_back(factor, order)
        for _ in range(SWEEPS):
            found.sweep(hessian)
        found.adopt(weighted, found.losses(hessian) > weighted.losses(hessian))
        return found

    method = "gptq" if fold is None else "gptq, folded"
    made = (
        _gathered((make(block, levels) for block in _blocks(read, weight_rows)), hessian, fold, method)
        for levels in wanted.levels
    )
    return min(made, key=lambda each: each.loss)


def _gathered(blocks: Iterable[Rounded], hessian: Floats, fold: Float32 | None, method: str) -> Found:
    """Blocks of rows as one weight."""
    codes, scale, zeros, loss = list[npt.NDArray[np.int8]](), list[Float32](), list[Float32](), 0.0
    for each in blocks:
        codes.append(each.codes.T)
        scale.append(each.scale.T)
        zeros += [] if each.zero is None else [each.zero.T]
        loss += float(each.losses(hessian).sum())
        levels, group = each.grid, each.group
    return Found(
        codes=np.concatenate(codes),
        scales=Scales(scale=np.concatenate(scale), zero=np.concatenate(zeros) if zeros else None),
        levels=levels,
        group=group,
        fold=fold,
        method=method,
        loss=loss,
        plain=0.0,
        energy=0.0,
    )
