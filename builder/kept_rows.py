"""Rows of weights whose codes an engine keeps, see `kept.py`.

Nothing is searched. Whole numbers of units stay as they are; other scales are rounded to float16, after a power of two
has gone into the row's scale, and the values of a table to multiples of one number: eight bits, or sixteen where eight
are too few.

    source's number                       is kept
    float16, bf16, E4M3, powers of two    exactly
    float32, products of two              to 2^-11 of it

That is true of scales, zero points and offsets, each by itself: a weight that is the difference of two loses more.
Bytes of FP8 become `F8Rows`, whose scales are float32, as stored.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ingot.builder.expressions import Float32, WeightReader
from ingot.builder.graph import small_value, weight_shape
from ingot.builder.kept import Grid, pieces_of, read_grid, table_numbers, w8_parts
from ingot.builder.unit_scales import lowest_scale, read_codes, read_counts
from ingot.dtypes import DType, Precision, from_float32
from ingot.plugins.f8_rows import F8Rows, joined_f8
from ingot.plugins.grouped import GroupedRows, joined
from ingot.plugins.quantised import Int8, QuantisedRows
from ingot.plugins.unit_rows import UnitRows, joined_units
from ingot.weight_formats import W4T

_TOP = 15  # largest exponent of a row's scales
_LOWEST = -126  # exponent of a power of two that float32 holds with all of its bits
_MIDDLE = 128  # of unsigned bytes; signed ones have 0 there


def kept_rows(
    reader: WeightReader, tensor: gs.Tensor, ranges: Sequence[tuple[int, int]], precision: Precision
) -> GroupedRows | UnitRows | F8Rows:
    """Rows of a weight that has this `kept_precision`, those of each range [begin, end) one after the other."""
    columns, grouped, floats, in_units = weight_shape(tensor)[-1], [], [], []
    for each in (piece for begin, end in ranges for piece in pieces_of(tensor, begin, end, 0, columns)):
        grid = read_grid(each.tensor)
        assert grid is not None, "kept_precision has found it"
        if precision.dtype is DType.F8:
            numbers = _f8_rows(reader, grid, each.begin, each.end, precision.group)
            floats.append(_f8_columns(numbers, each.first, each.last))
        elif precision.dtype.has_units:
            in_units.append(_unit_rows(reader, grid, each.begin, each.end, precision).columns(each.first, each.last))
        else:
            grouped.append(_columns(_rows(reader, grid, each.begin, each.end, precision), each.first, each.last))
    return joined_f8(floats) if floats else joined_units(in_units) if in_units else joined(grouped)


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
    """Rows [begin, end) of a weight, and which of them are stored as w8 is: signed bytes, and one scale."""
    columns = weight_shape(tensor)[-1]
    codes, scales, kept = [], [], []
    for each in pieces_of(tensor, begin, end, 0, columns):
        found, rows = w8_parts(each.tensor), each.end - each.begin
        if found is None:
            own, scale = np.zeros((rows, columns), np.int8), np.full(rows, np.nan, np.float32)
        else:
            whole = reader.read_numbers(found[0], each.begin, each.end)
            own = whole.astype(np.int8)[:, each.first : each.last]
            scale = reader.read_numbers(found[1], each.begin, each.end).astype(np.float32).reshape(-1)
        codes.append(own)
        scales.append(scale)
        kept.append(np.isfinite(scale))
    return QuantisedRows(scale=np.concatenate(scales), codes=np.concatenate(codes)), np.concatenate(kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Codes:
    """Codes as an engine stores them.

    numbers  uint8 from 0 on, or int8 where there is no table
    unit     what the value 1 is worth
    bits     of a code of a table
    """

    numbers: npt.NDArray[np.uint8] | Int8
    unit: float = 1.0
    table: Int8 | None = None
    more_bits: Int8 | None = None
    bits: int = 4


def _nibbles(grid: Grid, stored: npt.NDArray[Any]) -> _Codes:
    """Codes of four bits and the values that they stand for."""
    if grid.table:
        table, more_bits, unit = table_numbers(grid.table)
        return _Codes(numbers=stored, table=table, more_bits=more_bits, unit=unit)
    lowest = np.int8(-8 if grid.signed else 0)
    numbers = (stored.view(np.int8) - lowest).view(np.uint8)
    return _Codes(numbers=numbers, table=np.arange(lowest, lowest + 16, dtype=np.int8))


def _few(grid: Grid, stored: npt.NDArray[Any], bits: int) -> _Codes:
    """Codes of two or three bits: places of values among those of the table."""
    numbers, _, unit = table_numbers(grid.table)
    _, place = np.unique(np.array(grid.table), return_inverse=True)
    table = np.zeros_like(numbers)
    table[place] = numbers
    return _Codes(numbers=place.astype(np.uint8)[stored], table=table, unit=unit, bits=bits)


def _bytes(grid: Grid, stored: npt.NDArray[Any]) -> _Codes:
    """The values of codes of four or eight bits."""
    if grid.table:
        table, _, unit = table_numbers(grid.table)
        return _Codes(numbers=table[stored], unit=unit)
    return _Codes(numbers=(stored ^ np.uint8(_MIDDLE) if _is_unsigned_byte(grid) else stored).view(np.int8))


def _is_unsigned_byte(grid: Grid) -> bool:
    return grid.bits == 8 and not grid.signed


def _rows(reader: WeightReader, grid: Grid, begin: int, end: int, precision: Precision) -> GroupedRows:
    stored = reader.read_numbers(grid.codes, begin, end)

    def numbers(each: gs.Tensor) -> Float32:
        return _by_engine_groups(reader.read_numbers(each, begin, end), grid.group, stored.shape[1], precision.group)

    described = precision.dtype.weight_format
    assert described is not None, "codes are kept"
    if described.bits < W4T.bits:
        codes = _few(grid, stored, described.bits)
    else:
        codes = _nibbles(grid, stored) if described.bits == W4T.bits else _bytes(grid, stored)
    scale, shift = numbers(grid.scale), None if grid.shift is None else numbers(grid.shift)
    if _is_unsigned_byte(grid):
        assert shift is not None, "kept_precision asks for a zero point"
        shift = shift - np.float32(_MIDDLE)
    is_offset = grid.offset is not None
    powers = _powers(scale, shift if is_offset else None)
    with np.errstate(invalid="ignore"):
        scale = scale / powers[:, None]
        if shift is not None and is_offset:
            shift = shift / powers[:, None]
    return GroupedRows(
        scale=_with_factor(reader, grid, powers * np.float32(codes.unit), begin, end),
        codes=codes.numbers,
        group_scale=_half(scale),
        table=_for_each(codes.table, end - begin),
        more_bits=_for_each(codes.more_bits, end - begin),
        shift=None if shift is None else _half(shift),
        is_offset=np.full(end - begin, is_offset),
        bits=codes.bits,
        group=precision.group,
    )


def _for_each(line: Int8 | None, rows: int) -> Int8 | None:
    """The same line for each row."""
    return None if line is None else np.tile(line, (rows, 1))


def _unit_rows(reader: WeightReader, grid: Grid, begin: int, end: int, precision: Precision) -> UnitRows:
    described = precision.dtype.weight_format
    assert described is not None, "codes are kept"
    count, unit = read_counts(reader, grid.scale, begin, end, lowest_scale(described))
    offset_count, offset_unit = None, None
    if grid.offset is not None:
        offset_count, offset_unit = read_counts(reader, grid.offset, begin, end)
    bad = ~np.isfinite(unit).all(axis=1) | (offset_unit is not None and ~np.isfinite(offset_unit).all(axis=1))
    return UnitRows(
        scale=np.where(
            bad, np.float32(np.nan), _with_factor(reader, grid, np.ones(end - begin, np.float32), begin, end)
        ),
        codes=read_codes(reader, grid.codes, begin, end, described),
        count=count,
        unit=_half(unit),
        offset_count=offset_count,
        offset_unit=None if offset_unit is None else _half(offset_unit),
        bits=described.bits,
        group=precision.group,
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
    whole = small_value(grid.factor) if weight_shape(grid.factor) == () else None
    factor = reader.read_numbers(grid.factor, begin, end)[:, 0] if whole is None else whole.astype(np.float32)
    return np.asarray(scale / factor if grid.divides else scale * factor, np.float32)


def _powers(scale: Float32, offset: Float32 | None) -> Float32:
    """For each row a power of two, over which its numbers fill the range of float16; NaN where one is not a number."""
    top = np.abs(scale).max(axis=1, initial=0)
    if offset is not None:
        top = np.maximum(top, np.abs(offset).max(axis=1, initial=0))
    finite = np.isfinite(top)
    _, exponent = np.frexp(np.where(finite & (top > 0), top, np.float32(1)))
    powers = np.ldexp(np.float32(1), np.maximum(exponent - _TOP, _LOWEST))
    return np.where(finite, powers, np.float32(np.nan)).astype(np.float32)


def _half(values: Float32) -> Float32:
    """Rounded to float16; NaN, of a row whose scale is NaN, becomes zero."""
    return np.where(np.isnan(values), np.float32(0), values).astype(np.float16).astype(np.float32)
