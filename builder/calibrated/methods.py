"""One product's weight, quantised in several ways on its own inputs; the way that loses least stays.

    plain      each weight to the nearest level, under scales that hold the largest one: to compare with
    nearest    the same under scales that fit the weights best
    gptq       scales that fit where inputs are loud, with errors fed back and sweeps where a row gains by it
    folded     any of these of W * s, where inputs become x / s: loud columns take finer steps (AWQ, arXiv:2306.00978;
               with int8 inputs SmoothQuant, arXiv:2211.10438). Only where something before the product takes 1 / s

The loss is that of the product's outputs on the calibration text, over these outputs: sqrt(sum |x e|^2 / sum |x w|^2).

All ways share H and its factor. Some rows of a large weight tell which way loses least; then all rows go that way.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ingot.builder.calibrated.feedback import Floats, Rounded, damped, feedback_of, squares_of
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

_NUMBERS = 1 << 24  # of a weight worked on at a time
_TOKENS = 4096  # whose squares are summed at a time
_FEW_TOKENS = 1024  # worked on at a time where there is a copy of them
_CHOOSING = 512  # rows of a weight that choose a way, where it has more than twice as many
_RUN = 32  # of these rows lie together
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
            return np.asarray(np.max([np.abs(x).max(axis=0) for x in self._few()], axis=0), np.float32)
        return np.asarray(sum(np.abs(x).sum(axis=0) for x in self._few()) / self.count, np.float32)

    def squares(self) -> Floats:
        """H: sum of x x^T."""
        kind = _kind_of_squares(self.columns)
        total: Floats = np.zeros((self.columns, self.columns), kind)
        for part in self.parts:
            for begin in range(0, len(part), _TOKENS):
                x: Floats = part[begin : begin + _TOKENS].astype(kind, copy=False)
                total += x.T @ x
        return total

    def int8_loss(self, read: ReadRows, found: "Found") -> float:
        """Sum of squares of what outputs lose with inputs, folded as the weight is, rounded to int8."""
        loss, fold = 0.0, np.float32(1) if found.fold is None else found.fold
        for begin, end in _bounds(len(found.codes), self.columns):
            exact, made = read(begin, end).T, found.rows(begin, end).T
            for x in self._few():
                codes, scale = round_to_int8(x / fold)
                lost = x @ exact
                lost -= (codes * scale[:, None] * fold) @ made
                loss += float(np.einsum("tn,tn->", lost, lost, dtype=np.float64))
        return loss

    def _few(self) -> Iterator[Float32]:
        for part in self.parts:
            for begin in range(0, len(part), _FEW_TOKENS):
                yield part[begin : begin + _FEW_TOKENS]


def _kind_of_squares(columns: int) -> np.dtype[np.floating]:
    return np.dtype(np.float64 if columns <= _DOUBLE_UP_TO else np.float32)


def squares_memory(columns: int) -> int:
    """Bytes of one H."""
    return columns * columns * _kind_of_squares(columns).itemsize


def rows_at_a_time(columns: int) -> int:
    """Rows of a weight worked on at a time."""
    return max(_RUN, _NUMBERS // columns)


def quantise_product(
    read: ReadRows, weight_rows: int, inputs: Inputs, wanted: Wanted, tied: npt.NDArray[np.intp] | None
) -> Found:
    """The best of all ways. read: rows [begin, end) of the weight as float32. tied: the number of the factor that each
    column takes in a fold; None: there is no fold."""
    squares = _Squares.of(inputs, {"gptq", "folded"} & {*wanted.ways} != set())
    nearest = _measured(_nearest(read, weight_rows, squares, wanted), read, inputs, wanted)
    tried = [nearest] if "nearest" in wanted.ways else []
    if "plain" in wanted.ways:
        tried.append(_measured(_nearest(read, weight_rows, squares, wanted, plain=True), read, inputs, wanted))
    if squares.factor is not None:
        foldable = tied if "folded" in wanted.ways else None
        folds = [] if foldable is None else list(_folds(read, weight_rows, inputs, wanted, foldable))
        promising = _promising(folds, read, weight_rows, squares, inputs, wanted)
        ways = [(levels, fold) for fold in (None, *promising) for levels in wanted.levels]
        tried.append(_best(ways, read, weight_rows, squares, inputs, wanted))
    best = min(tried, key=lambda each: each.loss)
    return dataclasses.replace(best, plain=nearest.loss, energy=nearest.energy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Squares:
    """hessian: H, damped, float32; factor, order: its M with its columns in that order; no factor: nothing is fed
    back."""

    hessian: Float32
    factor: Floats | None
    order: npt.NDArray[np.intp]

    @classmethod
    def of(cls, inputs: Inputs, feed_back: bool) -> "_Squares":
        hessian = damped(inputs.squares())
        order = np.argsort(-np.einsum("kk->k", hessian), kind="stable")
        factor = feedback_of(hessian, order).astype(np.float32, copy=False) if feed_back else None
        return cls(hessian=hessian.astype(np.float32, copy=False), factor=factor, order=order)

    def diagonal(self, fold: Float32 | None) -> Float32:
        """Squares of inputs divided by a fold."""
        found: Float32 = np.einsum("kk->k", self.hessian)
        if fold is None:
            return found
        return found / fold / fold


def _promising(
    folds: Sequence[Float32], read: ReadRows, weight_rows: int, squares: _Squares, inputs: Inputs, wanted: Wanted
) -> list[Float32]:
    """The fold under which some rows, rounded to the nearest, lose least: feeding errors back takes far longer."""
    few, levels, losses = min(weight_rows, _TRIED), wanted.levels[0], list[float]()
    for fold in folds:
        weights = read(0, few)
        scales = search_scales(weights * fold, squares.diagonal(fold), wanted.group, levels)
        rounded = Rounded.start(weights, scales, levels, wanted.group, fold)
        tried = _gathered([(rounded, rounded.losses(squares.hessian))], "")
        losses.append(_measured(tried, read, inputs, wanted).loss)
    return [] if not folds else [folds[int(np.argmin(losses))]]


def _best(
    ways: Sequence[tuple[Levels, Float32 | None]],
    read: ReadRows,
    weight_rows: int,
    squares: _Squares,
    inputs: Inputs,
    wanted: Wanted,
) -> Found:
    """Errors fed back under the levels and the fold that lose least."""

    def made(way: tuple[Levels, Float32 | None], read: ReadRows, weight_rows: int) -> Found:
        return _measured(_fed_back(read, weight_rows, squares, wanted.group, *way), read, inputs, wanted)

    if len(ways) == 1 or weight_rows <= 2 * _CHOOSING:
        return min((made(way, read, weight_rows) for way in ways), key=lambda each: each.loss)
    firsts = np.linspace(0, weight_rows - _RUN, _CHOOSING // _RUN).astype(int)
    some = np.concatenate([read(first, first + _RUN) for first in firsts.tolist()])
    losses = [made(way, lambda begin, end: some[begin:end], len(some)).loss for way in ways]
    return made(ways[int(np.argmin(losses))], read, weight_rows)


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


def _bounds(weight_rows: int, columns: int) -> Iterator[tuple[int, int]]:
    size = rows_at_a_time(columns)
    for begin in range(0, weight_rows, size):
        yield begin, min(begin + size, weight_rows)


def _blocks(read: ReadRows, weight_rows: int, columns: int) -> Iterator[Float32]:
    return (read(begin, end) for begin, end in _bounds(weight_rows, columns))


def _folds(
    read: ReadRows, weight_rows: int, inputs: Inputs, wanted: Wanted, tied: npt.NDArray[np.intp]
) -> Iterator[Float32]:
    """Factors of columns, whose geometric mean is 1."""
    loud = _largest(inputs.loudness(wanted.int8_inputs), tied)
    heavy = _largest(
        np.max([np.abs(block).max(axis=0) for block in _blocks(read, weight_rows, inputs.columns)], axis=0), tied
    )
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


def _nearest(read: ReadRows, weight_rows: int, squares: _Squares, wanted: Wanted, *, plain: bool = False) -> Found:
    """What is made without any regard to inputs."""
    columns, levels, group = len(squares.hessian), wanted.levels[0], wanted.group
    even, energy = np.ones(columns, np.float32), 0.0

    def make(block: Float32) -> tuple[Rounded, npt.NDArray[np.float64]]:
        nonlocal energy
        scales = largest_scales(block, group, levels) if plain else search_scales(block, even, group, levels)
        made = Rounded.start(block, scales, levels, group)
        energy += float(squares_of(squares.hessian, made.weights).sum())
        return made, made.losses(squares.hessian)

    found = _gathered(map(make, _blocks(read, weight_rows, columns)), "plain" if plain else "nearest")
    return dataclasses.replace(found, energy=energy)


def _fed_back(
    read: ReadRows, weight_rows: int, squares: _Squares, group: int, levels: Levels, fold: Float32 | None
) -> Found:
    """Errors fed back where a row gains by it."""
    hessian, diagonal = squares.hessian, squares.diagonal(fold)

    def make(block: Float32) -> tuple[Rounded, npt.NDArray[np.float64]]:
        assert squares.factor is not None, "errors are fed back by the factor"
        scales = search_scales(block if fold is None else block * fold, diagonal, group, levels)
        weighted = Rounded.start(block, scales, levels, group, fold)
        found, least = weighted.copy(), weighted.losses(hessian)
        found.feed_back(squares.factor, squares.order)
        losses = found.sweep(hessian, SWEEPS)
        found.adopt(weighted, losses > least)
        return found, np.minimum(losses, least)

    method = "gptq" if fold is None else "gptq, folded"
    return _gathered(map(make, _blocks(read, weight_rows, len(hessian))), method)


def _gathered(blocks: Iterable[tuple[Rounded, npt.NDArray[np.float64]]], method: str) -> Found:
    """Blocks of rows, and what their outputs lose, as one weight."""
    codes, scale, zeros, loss = list[npt.NDArray[np.int8]](), list[Float32](), list[Float32](), 0.0
    for each, losses in blocks:
        codes.append(each.codes.T)
        scale.append(each.scale.T)
        zeros += [] if each.zero is None else [each.zero.T]
        loss += float(losses.sum())
        levels, group, fold = each.grid, each.group, each.fold
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
