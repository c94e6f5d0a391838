"""Rows of weights whose codes an engine keeps, see `kept.py`.

Nothing is searched: scales are rounded to float16, after a power of two has gone into the row's scale, and the values
of a table to multiples of one number: eight bits, or sixteen where eight are too few.

    source's scale                        is kept
    float16, bf16, E4M3, powers of two    exactly
    float32, products of two              to 2^-12 of each value

Bytes of FP8 become `F8Rows`, whose scales are float32, as stored.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ingot.builder.expressions import Float32, WeightReader
from ingot.builder.graph import weight_shape
from ingot.builder.kept import Grid, pieces_of, read_grid, table_numbers, w8_parts
from ingot.dtypes import DType, Precision, from_float32
from ingot.plugins.f8_rows import F8Rows, joined_f8
from ingot.plugins.grouped import GroupedRows, joined
from ingot.plugins.quantised import QuantisedRows

_TOP = 15  # largest exponent of a row's scales


def kept_rows(
    reader: WeightReader, tensor: gs.Tensor, ranges: Sequence[tuple[int, int]], precision: Precision
) -> GroupedRows | F8Rows:
    """Rows of a weight that has this `kept_precision`, those of each range [begin, end) one after the other."""
    columns, grouped, floats = weight_shape(tensor)[-1], [], []
    for each in (piece for begin, end in ranges for piece in pieces_of(tensor, begin, end, 0, columns)):
        grid = read_grid(each.tensor)
        assert grid is not None, "kept_precision has found it"
        if precision.dtype is DType.F8:
            numbers = _f8_rows(reader, grid, each.begin, each.end, precision.group)
            floats.append(_f8_columns(numbers, each.first, each.last))
        else:
            grouped.append(_columns(_rows(reader, grid, each.begin, each.end, precision), each.first, each.last))
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


def _rows(reader: WeightReader, grid: Grid, begin: int, end: int, precision: Precision) -> GroupedRows:
    codes, group = reader.read_numbers(grid.codes, begin, end), precision.group
    lowest = -8 if grid.signed else 0

    def numbers(each: gs.Tensor) -> Float32:
        return _by_engine_groups(reader.read_numbers(each, begin, end), grid.group, codes.shape[1], group)

    scale = numbers(grid.scale)
    shift = None if grid.zero is grid.offset else numbers(grid.zero if grid.offset is None else grid.offset)
    table, more, unit = (
        table_numbers(grid.table) if grid.table else (np.arange(lowest, lowest + 16, dtype=np.int8), None, 1.0)
    )
    values = None
    if precision.dtype in (DType.W8T, DType.W8TS):
        if grid.bits == 8 and not grid.signed:
            assert shift is not None, "kept_precision asks for a zero point"
            codes, shift = codes ^ np.uint8(128), shift - np.float32(128)
        values = table[codes] if grid.table else codes.view(np.int8)
    powers = _powers(scale, shift if grid.offset is not None else None)
    row_scale = powers * np.float32(unit)
    row_scale = _with_factor(reader, grid, row_scale, begin, end)
    with np.errstate(invalid="ignore"):
        if grid.offset is not None and shift is not None:
            shift = shift / powers[:, None]
        group_scale = _half(scale / powers[:, None])
    return GroupedRows(
        scale=row_scale.astype(np.float32),
        codes=(codes.view(np.int8) - np.int8(lowest)).view(np.uint8) if values is None else values,
        group_scale=group_scale,
        table=np.tile(table, (end - begin, 1)) if values is None else None,
        more_bits=None if more is None or values is not None else np.tile(more, (end - begin, 1)),
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
