"""The language of weight tables: what a stored weight is made of, as data.

    Take("a")                        the tensor as it is
    Transpose(e)                     rows and columns swapped, of each matrix where several are stacked
    Concat((e, f), axis=0)           one behind the other
    Stack((e, f))                    along a new first axis
    Split(e, parts=3, index=1)       one of equal parts along `axis`
    Regroup(e, parts=3)              rows that lie head by head, [heads, parts, n] → part by part, [parts, heads, n]
    KeyGroups(e, ("key", "value"), (1,))
                                     rows that lie key head by key head, each with parts of these kinds → some of the
                                     parts, each of all heads; a family's table leaves open how many rows a kind has
    Unpair(e, heads=8)               rows that lie as pairs in each head, [heads, n, 2] → halves, [heads, 2, n]; in a
                                     family's table heads=0 means one head an expert, over all rows of a stack
    FirstRow(e)                      the only row of a matrix, as a vector
    Skip(e, rows=2)                  without its first rows
    Swapped(e, outer=3, inner=2)     what lies as [outer, inner, n] along `axis`, from `begin` on → [inner, outer, n]
    Shaped(e, (6, 1))                the same elements in another shape
    LogOfMinus(e)                    log(-e), of float32
    PerExpert(e)                     in a family's table: a Stack with "{e}" in names replaced by 0, 1, 2, ...
    OneOf((e, f))                    in a family's table: the first whose first tensor is in the files

A Take streams block by block, as do a Stack, a Concat of rows, a FirstRow and a Shaped; the others are made in memory.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType
from ingot.errors import CheckpointError
from ingot.tensor_file import StoredTensor, read_elements, read_rows

Bits = npt.NDArray[np.generic]
Shape = tuple[int, ...]


class Tensor(Protocol):
    """What is known of a tensor before it is read, stored or quantised."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> Shape: ...


@dataclasses.dataclass(frozen=True)
class Take:
    name: str


@dataclasses.dataclass(frozen=True)
class Transpose:
    of: "Expr"


@dataclasses.dataclass(frozen=True)
class Concat:
    of: tuple["Expr", ...]
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Stack:
    of: tuple["Expr", ...]


@dataclasses.dataclass(frozen=True)
class Split:
    of: "Expr"
    parts: int
    index: int
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Regroup:
    """heads: 0 in a family's table stands for the model's number of heads."""

    of: "Expr"
    parts: int
    heads: int = 0


@dataclasses.dataclass(frozen=True)
class KeyGroups:
    """groups, sizes: of the key heads, and rows of each part in one of them; filled in by the model.

    kinds  of the parts. Linear attention: "key" rows of a key head, "value" those of the value heads that it serves,
           "head" one of each; attention: "queries" of the heads that a key head serves, "kv_head" of one head
    """

    of: "Expr"
    kinds: tuple[str, ...]
    take: tuple[int, ...]
    groups: int = 0
    sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Unpair:
    of: "Expr"
    heads: int


@dataclasses.dataclass(frozen=True)
class FirstRow:
    of: "Expr"


@dataclasses.dataclass(frozen=True)
class Skip:
    of: "Expr"
    rows: int


@dataclasses.dataclass(frozen=True)
class Swapped:
    of: "Expr"
    outer: int
    inner: int
    axis: int = 0
    begin: int = 0


@dataclasses.dataclass(frozen=True)
class Shaped:
    of: "Expr"
    shape: Shape


@dataclasses.dataclass(frozen=True)
class LogOfMinus:
    of: "Expr"


@dataclasses.dataclass(frozen=True)
class PerExpert:
    of: "Expr"


@dataclasses.dataclass(frozen=True)
class OneOf:
    of: tuple["Expr", ...]


_Rows = Regroup | KeyGroups | Unpair | FirstRow | Skip | Swapped | Shaped
Expr = Take | Transpose | Concat | Stack | Split | _Rows | LogOfMinus | PerExpert | OneOf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filling:
    """What a family's table leaves open. names: the tensors of the source, by which spellings are told apart.
    key_groups, key_sizes: of KeyGroups, the latter by kind."""

    heads: int
    experts: int
    names: Collection[str]
    key_groups: int = 0
    key_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """Weight `name` of the Graph is `expr`. `{i}` in names stands for the layer."""

    name: str
    expr: Expr


@dataclasses.dataclass(frozen=True)
class Drop:
    """A tensor that some files hold and nothing needs."""

    name: str


def sources(expr: Expr) -> tuple[str, ...]:
    """Names of the tensors that an expression reads."""
    match expr:
        case Take(name):
            return (name,)
        case Concat(of) | Stack(of) | OneOf(of):
            return tuple(name for part in of for name in sources(part))
        case _:
            return sources(expr.of)


def rename(expr: Expr, old: str, new: str) -> Expr:
    """The expression with `old` replaced by `new` in every tensor name."""
    if isinstance(expr, Take):
        return Take(expr.name.replace(old, new))
    if isinstance(expr, Concat | Stack | OneOf):
        return dataclasses.replace(expr, of=tuple(rename(part, old, new) for part in expr.of))
    return dataclasses.replace(expr, of=rename(expr.of, old, new))


def filled(expr: Expr, filling: Filling) -> Expr:
    """The expression with heads, experts and the files' spelling filled in."""
    match expr:
        case Take():
            return expr
        case Regroup(of):
            return dataclasses.replace(expr, of=filled(of, filling), heads=expr.heads or filling.heads)
        case KeyGroups(of, kinds):
            sizes = tuple(filling.key_sizes[kind] for kind in kinds)
            return dataclasses.replace(expr, of=filled(of, filling), groups=filling.key_groups, sizes=sizes)
        case Transpose(of) | Split(of) | FirstRow(of) | Skip(of) | Swapped(of) | Shaped(of) | LogOfMinus(of):
            return dataclasses.replace(expr, of=filled(of, filling))
        case Unpair(of, heads):
            return Unpair(filled(of, filling), heads=heads or filling.experts)
        case Concat(of) | Stack(of):
            return dataclasses.replace(expr, of=tuple(filled(part, filling) for part in of))
        case PerExpert(of):
            return Stack(tuple(filled(rename(of, "{e}", str(e)), filling) for e in range(filling.experts)))
        case OneOf(of):
            options = [filled(each, filling) for each in of]
            return next((each for each in options if sources(each)[0] in filling.names), options[0])


def infer(expr: Expr, tensors: Mapping[str, Tensor]) -> tuple[DType, Shape]:
    """Type and shape, from headers alone. Raises CheckpointError where parts do not fit together."""
    match expr:
        case Take(name):
            return tensors[name].dtype, tensors[name].shape
        case Transpose(of):
            dtype, shape = infer(of, tensors)
            return dtype, (*shape[:-2], shape[-1], shape[-2])
        case Split(of, parts, _, axis):
            dtype, shape = infer(of, tensors)
            if shape[axis] % parts:
                raise _unfit(expr, f"axis {axis} divisible by {parts}", str(list(shape)))
            return dtype, (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])
        case Regroup(of) | KeyGroups(of) | Unpair(of) | FirstRow(of) | Skip(of) | Swapped(of) | Shaped(of):
            dtype, shape = infer(of, tensors)
            return dtype, _rows_of(expr, shape)
        case LogOfMinus(of):
            dtype, shape = infer(of, tensors)
            if dtype is DType.F32:
                return dtype, shape
            raise _unfit(expr, DType.F32.value, dtype.value)
        case Concat(of, axis):
            dtype, shapes = _alike(expr, of, tensors, free_axis=axis)
            return dtype, (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])
        case Stack(of):
            dtype, shapes = _alike(expr, of, tensors)
            return dtype, (len(shapes), *shapes[0])
        case PerExpert() | OneOf():
            raise AssertionError("a family's table is filled in before its rows are made")


def _rows_of(expr: _Rows, shape: Shape) -> Shape:
    """The shape of what has the rows of an expression in another order, or some of them."""
    match expr:
        case Regroup(_, parts, heads):
            return _shared_evenly(expr, shape, shape[0], parts, heads)
        case KeyGroups(_, _, take, groups, sizes):
            if shape[0] != groups * sum(sizes):
                raise _unfit(expr, f"{groups} groups of {' + '.join(map(str, sizes))} rows", str(list(shape)))
            return groups * sum(sizes[part] for part in take), *shape[1:]
        case Unpair(_, heads):
            return _shared_evenly(expr, shape, math.prod(shape[:-1] if len(shape) > 1 else shape), 2, heads)
        case FirstRow():
            if len(shape) != 2 or shape[0] != 1:
                raise _unfit(expr, "one row", str(list(shape)))
            return shape[1:]
        case Skip(_, rows):
            if shape[0] <= rows:
                raise _unfit(expr, f"more than {rows} rows", str(list(shape)))
            return shape[0] - rows, *shape[1:]
        case Swapped(_, outer, inner, axis, begin):
            _shared_evenly(expr, shape, max(shape[axis] - begin, 1), outer, inner)
            return shape
        case Shaped(_, wanted):
            if math.prod(shape) != math.prod(wanted):
                raise _unfit(expr, f"as many numbers as {list(wanted)} has", str(list(shape)))
            return wanted


def _shared_evenly(expr: Expr, shape: Shape, rows: int, parts: int, heads: int) -> Shape:
    """The shape, of as many rows for each part of each head."""
    if rows % (parts * heads):
        raise _unfit(expr, f"rows divisible by {parts} x {heads}", str(list(shape)))
    return shape


def _alike(
    expr: Expr, parts: Sequence[Expr], tensors: Mapping[str, Tensor], free_axis: int | None = None
) -> tuple[DType, list[Shape]]:
    """Parts must share their type and, but for `free_axis`, their shape."""
    inferred = [infer(part, tensors) for part in parts]
    fixed = {
        (dtype, tuple(-1 if axis == free_axis else n for axis, n in enumerate(shape))) for dtype, shape in inferred
    }
    if len(fixed) > 1:
        got = ", ".join(f"{dtype.value} {list(shape)}" for dtype, shape in inferred)
        raise _unfit(expr, "parts of one type and shape", got)
    return inferred[0][0], [shape for _, shape in inferred]


def _unfit(expr: Expr, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        "tensors that are merged into one weight do not fit together",
        where=", ".join(sources(expr)),
        expected=expected,
        got=got,
    )


def blocks(expr: Expr, tensors: Mapping[str, StoredTensor], block: int) -> Iterator[Bits]:
    """The stored bits in C order, flat, at most `block` elements at a time."""
    if isinstance(expr, Take):
        size = math.prod(tensors[expr.name].shape)
        for begin in range(0, size, block):
            yield read_elements(tensors[expr.name], begin, min(begin + block, size))
    elif (parts := _consecutive_parts(expr)) is not None:
        for part in parts:
            yield from blocks(part, tensors, block)
    elif (stack := _stacked(expr, tensors)) is not None:
        for matrix in range(stack.shape[0]):
            size = math.prod(stack.shape[1:])
            bits = read_elements(stack, matrix * size, (matrix + 1) * size).reshape(stack.shape[1:]).T.reshape(-1)
            yield from (bits[begin : begin + block] for begin in range(0, size, block))
    else:
        whole = evaluate(expr, lambda name: read_rows(tensors[name]).reshape(tensors[name].shape)).reshape(-1)
        for begin in range(0, whole.size, block):
            yield whole[begin : begin + block]


def held(expr: Expr, tensors: Mapping[str, StoredTensor]) -> int:
    """Most elements that `blocks` makes in memory at a time, beyond a block."""
    if isinstance(expr, Take):
        return 0
    if (parts := _consecutive_parts(expr)) is not None:
        return max(held(part, tensors) for part in parts)
    if (stack := _stacked(expr, tensors)) is not None:
        return math.prod(stack.shape[1:])
    return math.prod(infer(expr, tensors)[1])


def _stacked(expr: Expr, tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The stored stack whose matrices an expression transposes, one after the other; None where it does not."""
    if not isinstance(expr, Transpose) or not isinstance(expr.of, Take):
        return None
    return tensors[expr.of.name] if len(tensors[expr.of.name].shape) == 3 else None


def _consecutive_parts(expr: Expr) -> tuple[Expr, ...] | None:
    """The parts whose elements follow one another in the expression's, None where they are mixed."""
    if isinstance(expr, FirstRow | Shaped):
        return (expr.of,)
    return expr.of if isinstance(expr, Stack) or (isinstance(expr, Concat) and expr.axis == 0) else None


def evaluate(expr: Expr, leaf: Callable[[str], Bits]) -> Bits:
    """The whole expression in memory. leaf: the elements of a stored tensor, or what stands for them."""
    match expr:
        case Take(name):
            return leaf(name)
        case Concat(of, axis):
            return np.concatenate([evaluate(part, leaf) for part in of], axis=axis)
        case Stack(of):
            return np.stack([evaluate(part, leaf) for part in of])
        case PerExpert() | OneOf():
            raise AssertionError("a family's table is filled in before its rows are made")
        case _:
            return _moved(expr, evaluate(expr.of, leaf))


def _moved(expr: Transpose | Split | _Rows | LogOfMinus, x: Bits) -> Bits:
    """What an expression makes of its only part."""
    match expr:
        case Transpose():
            return x.swapaxes(-1, -2)
        case Split(_, parts, index, axis):
            return np.split(x, parts, axis=axis)[index]
        case Regroup(_, parts, heads):
            return x.reshape(heads, parts, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
        case KeyGroups(_, _, take, groups, sizes):
            by_group = np.split(x.reshape(groups, -1, *x.shape[1:]), np.cumsum(sizes)[:-1], axis=1)
            return np.concatenate([by_group[part].reshape(-1, *x.shape[1:]) for part in take])
        case Unpair(_, heads):
            return x.reshape(heads, -1, 2, *(x.shape[-1:] if x.ndim > 1 else ())).swapaxes(1, 2).reshape(x.shape)
        case FirstRow():
            return x.reshape(-1)
        case Skip(_, rows):
            return x[rows:]
        case Swapped(_, outer, inner, axis, begin):
            head, rest = np.split(x, [begin], axis=axis)
            split = rest.reshape(*rest.shape[:axis], outer, inner, -1, *rest.shape[axis + 1 :])
            return np.concatenate([head, split.swapaxes(axis, axis + 1).reshape(rest.shape)], axis=axis)
        case Shaped(_, shape):
            return x.reshape(shape)
        case LogOfMinus():
            with np.errstate(divide="ignore", invalid="ignore"):  # what is no number is counted where it is written
                return np.log(-x.view(np.float32))
