"""Weights whose codes an engine keeps: which expressions of codes and scales are rows of w4t, w4ts, w8 or f8, and
these rows.

A code of 4 bits, a table of 16 values or none, scales of groups of columns, zero points or offsets, and a factor of
each row or none become `GroupedRows`. Nothing is searched: scales are rounded to float16, after a power of two has gone
into the row's scale, and the values of a table to multiples of one number: eight bits, or sixteen where eight are too
few.

    source's scale                        is kept
    float16, bf16, E4M3, powers of two    exactly
    float32, products of two              to 2^-12 of each value

Bytes of FP8 become `F8Rows`, whose scales are float32, as stored.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ingot.builder.expressions import Float32, WeightReader, is_f8, is_signed_bytes, nibbles_of
from ingot.builder.graph import is_op, producer, slice_of, small_value, weight_shape
from ingot.dtypes import DType, Precision, from_float32
from ingot.plugins.f8_rows import F8Rows, joined_f8
from ingot.plugins.grouped import GroupedRows, joined
from ingot.plugins.layouts import PANEL
from ingot.plugins.quantised import Int8, QuantisedRows
from ingot.weight_formats import F8, W4T

Numbers = npt.NDArray[Any]
_TOP = 15  # largest exponent of a row's scales
_LARGEST = 127  # value of a table
_PARTS = 256  # of a whole number, what one of its further bits is worth
_TABLE_ERROR = 2.0**-16  # of the largest value, that needs no further bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """What a weight [N, K] is made of.

    group   columns that share a scale
    table   nothing where codes are numbers
    floats  whether codes are FP8
    """

    codes: gs.Constant
    signed: bool
    group: int
    scale: gs.Tensor
    zero: gs.Tensor | None = None
    offset: gs.Tensor | None = None
    table: tuple[float, ...] = ()
    factor: gs.Tensor | None = None
    divides: bool = False
    floats: bool = False

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

    @property
    def kind(self) -> tuple[object, ...]:
        """The rows of a panel must have the same."""
        return self.signed, self.table, self.zero is not None, self.offset is not None


def kept_precision(*tensors: gs.Tensor) -> Precision | None:
    """What keeps the codes of a weight, or of several whose rows lie one below the other; None where nothing does."""
    grids = [read_grid(each.tensor) for each in _all_pieces(*tensors)]
    found = [grid for grid in grids if grid is not None]
    if len(found) < len(grids) or not panels_alike(*tensors):
        return None
    group = min(grid.engine_group for grid in found)
    floats = {grid.floats for grid in found}
    if len(floats) > 1 or group == 0:
        return None
    if floats == {True}:
        return Precision(dtype=DType.F8, group=0 if all(grid.whole for grid in found) else group)
    shifted = any(grid.zero is not None or grid.offset is not None for grid in found)
    return Precision(dtype=DType.W4TS if shifted else DType.W4T, group=group)


def panels_alike(*tensors: gs.Tensor) -> bool:
    """Whether rows of one panel are of one kind, in weights whose codes are kept and whose rows lie one below the
    other."""
    pieces = _all_pieces(*tensors)
    grids = [read_grid(each.tensor) for each in pieces]
    kinds = {None if grid is None else grid.kind for grid in grids}
    return len(kinds) == 1 or all((each.end - each.begin) % PANEL == 0 for each in pieces[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
    """Rows [begin, end) and columns [first, last) of a weight that stands by itself, seen as a matrix."""

    tensor: gs.Tensor
    begin: int
    end: int
    first: int
    last: int


def _all_pieces(*tensors: gs.Tensor) -> list[_Piece]:
    found: list[_Piece] = []
    for tensor in tensors:
        *outer, columns = weight_shape(tensor)
        found.extend(_pieces(tensor, 0, math.prod(outer), 0, columns))
    return found


def _pieces(tensor: gs.Tensor, begin: int, end: int, first: int, last: int) -> Iterator[_Piece]:
    """Where these rows and columns come from, row after row: through what puts weights together or takes a part."""
    node, shape = producer(tensor), weight_shape(tensor)
    members: list[tuple[gs.Tensor, int, int]] = []  # (weight, numbers [low, high) of it along an axis)
    if is_op(node, "Slice"):
        low, high, axis = slice_of(node)
        members = [(node.inputs[0], low, high)]
        if axis == len(shape) - 1:
            yield from _pieces(node.inputs[0], begin, end, low + first, low + last)
            return
    elif is_op(node, "Concat") and node.attrs["axis"] % len(shape) < len(shape) - 1:
        axis = node.attrs["axis"] % len(shape)
        members = [(each, 0, weight_shape(each)[axis]) for each in node.inputs]
    else:
        yield _Piece(tensor=tensor, begin=begin, end=end, first=first, last=last)
        return
    inner, start = math.prod(shape[axis + 1 : -1]), 0
    for outer in range(math.prod(shape[:axis])):
        for source, low, high in members:
            rows, offset = (high - low) * inner, (outer * weight_shape(source)[axis] + low) * inner - start
            if max(begin, start) < min(end, start + rows):
                yield from _pieces(source, max(begin, start) + offset, min(end, start + rows) + offset, first, last)
            start += rows


def read_grid(tensor: gs.Tensor) -> Grid | None:
    """The grid of one weight; for a stack of experts [experts, N, K] the grid of all rows."""
    shape, node = weight_shape(tensor), producer(tensor)
    if is_op(node, "Reshape") and len(shape) == 3 and len(weight_shape(node.inputs[0])) == 2:
        return read_grid(node.inputs[0]) if weight_shape(node.inputs[0])[1] == shape[2] else None
    if node is None or len(shape) != 2:
        return None
    found = _dequantised(node) if node.op == "DequantizeLinear" else _by_groups(node, shape[1])
    if found is None and node.op in ("Mul", "Div") and weight_shape(node.inputs[1]) == (shape[0], 1):
        inner = read_grid(node.inputs[0])
        if inner is not None and inner.factor is None:
            return dataclasses.replace(inner, factor=node.inputs[1], divides=node.op == "Div")
    return found


def _dequantised(node: gs.Node) -> Grid | None:
    codes, scale, *zero = node.inputs
    floats, signed = is_f8(codes), nibbles_of(codes)
    if floats and not zero:
        signed = True
    if signed is None or node.attrs.get("axis", 1) not in (1, -1) or not node.attrs.get("block_size", 0):
        return None
    return Grid(
        codes=codes,
        signed=signed,
        group=node.attrs["block_size"],
        scale=scale,
        zero=zero[0] if zero else None,
        floats=floats,
    )


def _by_groups(node: gs.Node, columns: int) -> Grid | None:
    """((table[codes] or codes) - zero) * scale + offset"""
    given: dict[str, gs.Tensor] = {}
    size, grouped = columns, is_op(node, "Reshape") and len(weight_shape(node.inputs[0])) == 3
    step: gs.Node | None = node
    if grouped:
        size, step = weight_shape(node.inputs[0])[2], producer(node.inputs[0])
    for name, op in (("offset", "Add"), ("scale", "Mul"), ("zero", "Sub")):
        if is_op(step, op):
            given[name] = _without_axis(step.inputs[1]) if grouped else step.inputs[1]
            step = producer(step.inputs[0])
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
    if not is_op(step, "Cast") or (signed := nibbles_of(step.inputs[0])) is None or (table and signed):
        return None
    groups = (weight_shape(step.inputs[0])[0], -(-columns // size))
    if "scale" not in given or any(weight_shape(each) != groups for each in given.values()):
        return None
    if (table and given.keys() & {"zero", "offset"}) or {"zero", "offset"} <= given.keys():
        return None
    return Grid(codes=step.inputs[0], signed=signed, group=size, table=table, **given)


def _without_axis(tensor: gs.Tensor) -> gs.Tensor:
    node = producer(tensor)
    return node.inputs[0] if is_op(node, "Unsqueeze") else tensor


def kept_rows(
    reader: WeightReader, tensor: gs.Tensor, ranges: Sequence[tuple[int, int]], precision: Precision
) -> GroupedRows | F8Rows:
    """Rows of a weight that has this `kept_precision`, those of each range [begin, end) one after the other."""
    columns, grouped, floats = weight_shape(tensor)[-1], [], []
    for each in (piece for begin, end in ranges for piece in _pieces(tensor, begin, end, 0, columns)):
        grid = read_grid(each.tensor)
        assert grid is not None, "kept_precision has found it"
        if precision.dtype is DType.F8:
            numbers = _f8_rows(reader, grid, each.begin, each.end, precision.group)
            floats.append(_f8_columns(numbers, each.first, each.last))
        else:
            grouped.append(_columns(_rows(reader, grid, each.begin, each.end, precision.group), each.first, each.last))
    return joined_f8(floats) if floats else joined(grouped)


def _columns(rows: GroupedRows, begin: int, end: int) -> GroupedRows:
    """Columns of rows: whole groups."""
    groups = slice(begin // rows.group, -(-end // rows.group))
    return dataclasses.replace(
        rows,
        codes=rows.codes[:, begin:end],
        group_scale=rows.group_scale[:, groups],
        shift=None if rows.shift is None else rows.shift[:, groups],
    )


def _f8_columns(rows: F8Rows, begin: int, end: int) -> F8Rows:
    scales = rows.group_scale
    if scales is not None:
        scales = scales[:, begin // rows.group : -(-end // rows.group)]
    return dataclasses.replace(rows, codes=rows.codes[:, begin:end], group_scale=scales)


def kept_bytes(
    reader: WeightReader, tensor: gs.Tensor, begin: int, end: int
) -> tuple[QuantisedRows, npt.NDArray[np.bool_]]:
    """Rows [begin, end) of a weight, and which of them are stored as w8 is: signed bytes but -128, and one scale."""
    columns = weight_shape(tensor)[-1]
    codes, scales, kept = [], [], []
    for each in _pieces(tensor, begin, end, 0, columns):
        found, rows = _bytes_of(each.tensor), each.end - each.begin
        if found is None:
            own, scale = np.zeros((rows, columns), np.int8), np.full(rows, np.nan, np.float32)
        else:
            whole = reader.read_numbers(found[0], each.begin, each.end)
            own = whole.astype(np.int8)[:, each.first : each.last]
            scale = reader.read_numbers(found[1], each.begin, each.end).astype(np.float32).reshape(-1)
        codes.append(own)
        scales.append(scale)
        kept.append(np.isfinite(scale) & (own.min(axis=1, initial=0) >= -_LARGEST))
    return QuantisedRows(scale=np.concatenate(scales), codes=np.concatenate(codes)), np.concatenate(kept)


def _bytes_of(tensor: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor] | None:
    """(codes, scale)"""
    node, shape = producer(tensor), weight_shape(tensor)
    if is_op(node, "Reshape") and len(shape) == 3 and weight_shape(node.inputs[0])[-1] == shape[2]:
        return _bytes_of(node.inputs[0])
    if not is_op(node, "DequantizeLinear") or len(node.inputs) != 2 or len(shape) != 2:
        return None
    codes, scale = node.inputs
    one = node.attrs.get("block_size", 0) >= shape[1] and weight_shape(scale) == (shape[0], 1)
    return (codes, scale) if one and node.attrs.get("axis", 1) in (1, -1) and is_signed_bytes(codes) else None


def _rows(reader: WeightReader, grid: Grid, begin: int, end: int, group: int) -> GroupedRows:
    codes = reader.read_numbers(grid.codes, begin, end)
    lowest = -8 if grid.signed else 0

    def numbers(each: gs.Tensor) -> Float32:
        return _by_engine_groups(reader.read_numbers(each, begin, end), grid.group, codes.shape[1], group)

    scale = numbers(grid.scale)
    shift = None if grid.zero is grid.offset else numbers(grid.zero if grid.offset is None else grid.offset)
    table, more, unit = _table(grid.table) if grid.table else (np.arange(lowest, lowest + 16, dtype=np.int8), None, 1.0)
    powers = _powers(scale, shift if grid.offset is not None else None)
    row_scale = powers * np.float32(unit)
    row_scale = _with_factor(reader, grid, row_scale, begin, end)
    with np.errstate(invalid="ignore"):
        if grid.offset is not None and shift is not None:
            shift = shift / powers[:, None]
        group_scale = _half(scale / powers[:, None])
    return GroupedRows(
        scale=row_scale.astype(np.float32),
        codes=(codes.view(np.int8) - np.int8(lowest)).view(np.uint8),
        group_scale=group_scale,
        table=np.tile(table, (end - begin, 1)),
        more_bits=None if more is None else np.tile(more, (end - begin, 1)),
        shift=None if shift is None else _half(shift),
        is_offset=np.full(end - begin, grid.offset is not None),
        group=group,
    )


def _f8_rows(reader: WeightReader, grid: Grid, begin: int, end: int, group: int) -> F8Rows:
    """group: of the engine, 0 where every row has one scale."""
    codes = from_float32(reader.read_numbers(grid.codes, begin, end), DType.F8).astype(np.uint8)
    scale = reader.read_numbers(grid.scale, begin, end).astype(np.float32)
    row_scale = _with_factor(reader, grid, np.ones(end - begin, np.float32) if group else scale[:, 0], begin, end)
    return F8Rows(
        scale=np.where(((codes & 0x7F) == 0x7F).any(axis=1), np.float32(np.nan), row_scale),  # kernels know no NaN
        codes=codes,
        group_scale=_by_engine_groups(scale, grid.group, codes.shape[1], group) if group else None,
        group=group,
    )


def _by_engine_groups(numbers: npt.NDArray[Any], source: int, columns: int, group: int) -> Float32:
    """[rows, groups of the source] -> [rows, groups of the engine], each a part of one."""
    repeated = np.repeat(numbers.astype(np.float32), max(1, -(-min(source, columns) // group)), axis=1)
    return repeated[:, : -(-columns // group)]


def _with_factor(reader: WeightReader, grid: Grid, scale: Float32, begin: int, end: int) -> Float32:
    if grid.factor is None:
        return scale
    factor = reader.read_numbers(grid.factor, begin, end)[:, 0]
    return np.asarray(scale / factor if grid.divides else scale * factor, np.float32)


def _powers(scale: Float32, offset: Float32 | None) -> Float32:
    """For each row a power of two, over which its numbers fill the range of float16; NaN where one is not a number."""
    top = np.abs(scale).max(axis=1, initial=0)
    if offset is not None:
        top = np.maximum(top, np.abs(offset).max(axis=1, initial=0))
    finite = np.isfinite(top)
    _, exponent = np.frexp(np.where(finite & (top > 0), top, np.float32(1)))
    return np.where(finite, np.ldexp(np.float32(1), exponent - _TOP), np.float32(np.nan)).astype(np.float32)


def _half(values: Float32) -> Float32:
    """Rounded to float16; NaN, of a row whose scale is NaN, becomes zero."""
    return np.where(np.isnan(values), np.float32(0), values).astype(np.float16).astype(np.float32)


@functools.cache
def _table(values: tuple[float, ...]) -> tuple[Int8, Int8 | None, float]:
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
