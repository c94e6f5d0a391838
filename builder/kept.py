"""Weights whose codes an engine keeps: which expressions of codes and scales are rows of a format of
`ingot.weight_formats`. `kept_rows.py` makes these rows.

A code of 4 or 8 bits, a table of 16 values or none, scales of groups of columns, zero points or offsets, and a factor
of each row or none can be kept. Where weights that are one have codes of 4 bits and of 8, the values of the former
become bytes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from ingot.builder.expressions import matrix_type
from ingot.builder.graph import is_op, producer, slice_of, small_value, weight_shape
from ingot.builder.unit_scales import Kind, in_units, unit_precision
from ingot.dtypes import DType, Precision
from ingot.plugins.quantised import Int8
from ingot.weight_formats import F8, PANEL, W2T, W3T, W4T

Numbers = npt.NDArray[Any]
_LARGEST = 127  # value of a table
_PARTS = 256  # of a whole number, what one of its further bits is worth
_TABLE_ERROR = 2.0**-16  # of the largest value, that needs no further bits


class _Code(NamedTuple):
    """An integer that a weight's codes are."""

    bits: int
    signed: bool


_CODES: dict[int, _Code] = {
    onnx.TensorProto.INT4: _Code(bits=4, signed=True),
    onnx.TensorProto.UINT4: _Code(bits=4, signed=False),
    onnx.TensorProto.INT8: _Code(bits=8, signed=True),
    onnx.TensorProto.UINT8: _Code(bits=8, signed=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """What a weight [N, K] is made of.

    bits    of a code, 4 or 8
    group   columns that share a scale
    table   nothing where codes are numbers
    floats  whether codes are FP8
    factor  of each row, or one of all
    """

    codes: gs.Constant
    signed: bool
    bits: int = 4
    group: int
    scale: gs.Tensor
    zero: gs.Tensor | None = None
    offset: gs.Tensor | None = None
    table: tuple[float, ...] = ()
    factor: gs.Tensor | None = None
    divides: bool = False
    floats: bool = False

    @property
    def shift(self) -> gs.Tensor | None:
        """The zero points, or the offsets: no weight has both."""
        return self.offset if self.zero is None else self.zero

    @property
    def whole(self) -> bool:
        """Whether a row has one scale."""
        return self.group >= weight_shape(self.codes)[1]

    @property
    def engine_group(self) -> int:
        """The largest group of the format that no group of the source cuts; 0 where there is none."""
        groups = F8.groups if self.floats else W4T.groups
        fitting = max(groups) if self.whole else math.gcd(self.group, max(groups))
        return fitting if fitting in groups else 0

    def kind_of_units(self, piece: "Piece") -> Kind | None:
        """None where scales are not whole numbers of units."""
        if self.zero is not None or self.table or self.floats or in_units(self.scale) is None:
            return None
        columns = piece.first, piece.last, weight_shape(self.codes)[1]
        return Kind(self.bits, self.signed, self.group, self.scale, self.offset, columns)

    def kind(self, bits: int) -> tuple[object, ...]:
        """What the rows of a panel share. bits: of the engine's codes; bytes are signed values, without a table."""
        shift = self.zero is not None, self.offset is not None
        return shift if bits == 8 else (self.signed, self.table, *shift)


def kept_precision(*tensors: gs.Tensor, units: int = 1) -> Precision | None:
    """What keeps the codes of a weight, or of several whose rows lie one below the other; None where nothing does.

    units  parts that sums over columns are divided into, of which none may cut a unit
    """
    pieces = _all_pieces(*tensors)
    grids = [read_grid(each.tensor) for each in pieces]
    found = [grid for grid in grids if grid is not None]
    if len(found) < len(grids) or not panels_alike(*tensors):
        return None
    if held_by_w8(*tensors):
        return None
    kinds = [grid.kind_of_units(piece) for grid, piece in zip(found, pieces, strict=True)]
    if kinds and None not in kinds and (kept := unit_precision([each for each in kinds if each], units)):
        return kept
    group = min(grid.engine_group for grid in found)
    floats = {grid.floats for grid in found}
    if group == 0 or len(floats) > 1:
        return None
    if floats == {True}:
        return Precision(dtype=DType.F8, group=0 if all(grid.whole for grid in found) else group)
    shifted = any(grid.shift is not None for grid in found)
    if _bits(found) == W4T.bits:
        few = None if shifted else _few_bits(found, group)
        return few or Precision(dtype=DType.W4TS if shifted else DType.W4T, group=group)
    if any(grid.table and table_numbers(grid.table)[1] is not None for grid in found):
        return None  # such values do not fit a byte
    return Precision(dtype=DType.W8TS if shifted else DType.W8T, group=group)


def _few_bits(grids: Sequence[Grid], group: int) -> Precision | None:
    """The format of the fewest bits that hold a code for each value of any table."""
    tables = [grid.table for grid in grids]
    if not all(tables) or any(table_numbers(table)[1] is not None for table in tables):
        return None
    most = max(len(set(table)) for table in tables)
    fitting = (each for each in (W2T, W3T) if most <= each.codes[1] + 1 and group in each.groups)
    return next((Precision(dtype=DType(each.dtype), group=group) for each in fitting), None)


def _bits(grids: Sequence[Grid]) -> int:
    """Bits of the engine's codes where the rows of these grids are one weight."""
    return max(grid.bits for grid in grids)


def panels_alike(*tensors: gs.Tensor) -> bool:
    """Whether rows of one panel are of one kind, in weights whose codes are kept and whose rows lie one below the
    other."""
    return rows_alike(*tensors) or all((each.end - each.begin) % PANEL == 0 for each in _all_pieces(*tensors)[:-1])


def rows_alike(*tensors: gs.Tensor) -> bool:
    """Whether all rows are of one kind; those whose codes are not kept are of one, too."""
    grids = [read_grid(each.tensor) for each in _all_pieces(*tensors)]
    found = [grid for grid in grids if grid is not None]
    if len(found) < len(grids):
        return not found
    bits = _bits(found)
    return len({grid.kind(bits) for grid in found}) == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows [begin, end) and columns [first, last) of a weight that stands by itself, seen as a matrix."""

    tensor: gs.Tensor
    begin: int
    end: int
    first: int
    last: int


def _all_pieces(*tensors: gs.Tensor) -> list[Piece]:
    found: list[Piece] = []
    for tensor in tensors:
        *outer, columns = weight_shape(tensor)
        found.extend(pieces_of(tensor, 0, math.prod(outer), 0, columns))
    return found


def pieces_of(tensor: gs.Tensor, begin: int, end: int, first: int, last: int) -> Iterator[Piece]:
    """Where these rows and columns come from, row after row: through what puts weights together or takes a part."""
    node, shape = producer(tensor), weight_shape(tensor)
    members: list[tuple[gs.Tensor, int, int]] = []  # (weight, numbers [low, high) of it along an axis)
    if is_op(node, "Reshape") and is_op(producer(node.inputs[0]), "Concat") and _same_rows(node.inputs[0], shape):
        yield from pieces_of(node.inputs[0], begin, end, first, last)
        return
    if is_op(node, "Slice"):
        low, high, axis = slice_of(node)
        members = [(node.inputs[0], low, high)]
        if axis == len(shape) - 1:
            yield from pieces_of(node.inputs[0], begin, end, low + first, low + last)
            return
    elif is_op(node, "Concat") and node.attrs["axis"] % len(shape) < len(shape) - 1:
        axis = node.attrs["axis"] % len(shape)
        members = [(each, 0, weight_shape(each)[axis]) for each in node.inputs]
    else:
        yield Piece(tensor=tensor, begin=begin, end=end, first=first, last=last)
        return
    inner, start = math.prod(shape[axis + 1 : -1]), 0
    for outer in range(math.prod(shape[:axis])):
        for source, low, high in members:
            rows, offset = (high - low) * inner, (outer * weight_shape(source)[axis] + low) * inner - start
            if max(begin, start) < min(end, start + rows):
                yield from pieces_of(source, max(begin, start) + offset, min(end, start + rows) + offset, first, last)
            start += rows


def _same_rows(tensor: gs.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether what has this shape has the rows of a matrix, one below the other."""
    return len(weight_shape(tensor)) == 2 and weight_shape(tensor)[1] == shape[-1]


def read_grid(tensor: gs.Tensor) -> Grid | None:
    """The grid of one weight; for a stack of experts [experts, N, K] the grid of all rows."""
    shape, node = weight_shape(tensor), producer(tensor)
    if is_op(node, "Reshape") and len(shape) == 3 and len(weight_shape(node.inputs[0])) == 2:
        return read_grid(node.inputs[0]) if weight_shape(node.inputs[0])[1] == shape[2] else None
    if node is None or len(shape) != 2:
        return None
    found = _dequantised(node) if node.op == "DequantizeLinear" else _by_groups(node, shape[1])
    if found is None and node.op in ("Mul", "Div") and weight_shape(node.inputs[1]) in ((shape[0], 1), ()):
        inner = read_grid(node.inputs[0])
        if inner is not None and inner.factor is None:
            return dataclasses.replace(inner, factor=node.inputs[1], divides=node.op == "Div")
    return found


def _dequantised(node: gs.Node) -> Grid | None:
    codes, scale, *zeros = node.inputs
    zero, group = zeros[0] if zeros else None, node.attrs.get("block_size", 0)
    if node.attrs.get("axis", 1) not in (1, -1) or not group:
        return None
    if matrix_type(codes) == onnx.TensorProto.FLOAT8E4M3FN:
        return Grid(codes=codes, signed=True, bits=8, group=group, scale=scale, floats=True) if zero is None else None
    code = _code_of(codes)
    if code is None or not _fits(code, zero):
        return None
    return Grid(codes=codes, signed=code.signed, bits=code.bits, group=group, scale=scale, zero=zero)


def _code_of(tensor: gs.Tensor) -> _Code | None:
    """What a stored matrix of codes has; None for anything else."""
    stored = matrix_type(tensor)
    return None if stored is None else _CODES.get(stored)


def _fits(code: _Code, zero: gs.Tensor | None) -> bool:
    """Whether an engine holds such codes: its bytes have signs, and only a zero point takes up the difference."""
    return code.bits == 4 or code.signed or zero is not None


def _by_groups(node: gs.Node, columns: int) -> Grid | None:
    """((table[codes] or codes) - zero) * scale + offset"""
    given: dict[str, gs.Tensor] = {}
    size, grouped = columns, is_op(node, "Reshape") and len(weight_shape(node.inputs[0])) == 3
    step: gs.Node | None = node
    if grouped:
        size, step = weight_shape(node.inputs[0])[2], producer(node.inputs[0])
    for name, op in (("offset", "Add"), ("scale", "Mul"), ("zero", "Sub")):
        if is_op(step, op):
            given[name], step = step.inputs[1], producer(step.inputs[0])
    if grouped:
        if not is_op(step, "Reshape"):
            return None
        step = producer(step.inputs[0])
    table: tuple[float, ...] = ()
    if is_op(step, "Gather") and step.attrs.get("axis", 0) == 0:
        values = small_value(step.inputs[0])
        if values is None or values.shape != (16,) or not np.isfinite(values).all():
            return None
        table, step = tuple(values.tolist()), producer(step.inputs[1])
    code = _code_of(step.inputs[0]) if is_op(step, "Cast") else None
    if step is None or code is None or not _fits(code, given.get("zero")):
        return None
    if table and code != _Code(bits=4, signed=False):
        return None
    if "scale" not in given or (table and given.keys() & {"zero", "offset"}) or {"zero", "offset"} <= given.keys():
        return None
    groups = (weight_shape(step.inputs[0])[0], -(-columns // size))
    found = {name: _of_groups(each) if grouped else each for name, each in given.items()}
    known = {name: each for name, each in found.items() if each is not None and weight_shape(each) == groups}
    if known.keys() < given.keys():
        return None
    return Grid(codes=step.inputs[0], signed=code.signed, bits=code.bits, group=size, table=table, **known)


def _of_groups(spread: gs.Tensor) -> gs.Tensor | None:
    """The numbers [N, groups] that all columns of a group have; None of what is spread in another way."""
    node = producer(spread)
    if not is_op(node, "Unsqueeze") or weight_shape(spread) != (*weight_shape(node.inputs[0]), 1):
        return None
    return node.inputs[0]


def w8_parts(tensor: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor] | None:
    """(codes, scale) of a weight that is stored as w8 is: signed bytes, and one scale for each row."""
    node, shape = producer(tensor), weight_shape(tensor)
    if is_op(node, "Reshape") and len(shape) == 3 and weight_shape(node.inputs[0])[-1] == shape[2]:
        return w8_parts(node.inputs[0])
    if not is_op(node, "DequantizeLinear") or len(node.inputs) != 2 or len(shape) != 2:
        return None
    codes, scale = node.inputs
    one = node.attrs.get("block_size", 0) >= shape[1] and weight_shape(scale) == (shape[0], 1)
    signed_bytes = _code_of(codes) == _Code(bits=8, signed=True)
    return (codes, scale) if one and signed_bytes and node.attrs.get("axis", 1) in (1, -1) else None


def held_by_w8(*tensors: gs.Tensor) -> bool:
    """Whether w8 keeps the codes of weights whose rows lie one below the other."""
    return all(w8_parts(each.tensor) for each in _all_pieces(*tensors))


@functools.cache
def table_numbers(values: tuple[float, ...]) -> tuple[Int8, Int8 | None, float]:
    """(whole numbers, 256ths beside them or None, what the number 1 is worth): those nearest to the values, and the
    fewest that are."""
    wanted = np.array(values)
    top = float(np.abs(wanted).max()) or 1.0

    def nearest(most: Numbers) -> Numbers:
        """[..., 16], where the largest value is so many"""
        return np.rint(wanted / top * most[..., None])

    def fewest(most: Numbers) -> int:
        errors = np.abs(nearest(most) * (top / most[:, None]) - wanted).max(axis=1) / top
        return int(most[np.argmin(np.round(errors, 7))])

    whole = fewest(np.arange(1, _LARGEST + 1))
    numbers = nearest(np.array(whole))
    if np.abs(numbers * (top / whole) - wanted).max() <= _TABLE_ERROR * top:
        return numbers.astype(np.int8), None, top / whole
    parts = fewest(np.arange(_PARTS, _LARGEST * _PARTS + 1))
    numbers = nearest(np.array(parts)).astype(np.int32)
    rest = (numbers + _PARTS // 2) % _PARTS - _PARTS // 2
    table = ((numbers - rest) // _PARTS).astype(np.int8)
    return table, rest.astype(np.int8), top / parts * _PARTS
