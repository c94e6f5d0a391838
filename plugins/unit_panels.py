"""Panels of rows whose groups have whole numbers of units (w2ks, w3k, w4ks, w5ks, w6k), as `layouts.py` draws them.

Scales of rows are read and written there, all that lies behind them here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.plugins.code_lines import gather_lines, spread_lines
from ingot.plugins.quantised import Float32, Int8
from ingot.plugins.unit_rows import UnitRows
from ingot.weight_formats import HEADER_BYTES, PANEL, UNIT_COLUMNS, WeightFormat

Bytes = npt.NDArray[np.uint8]
_LINE = PANEL * 4  # bytes, of four k of each column


def write_units(rows: UnitRows, panels: Bytes) -> None:
    """Numbers of groups and codes of rows [N, K] into panels [ceil(N / PANEL), bytes] of zeros."""
    count, blocks, per_unit = len(panels), -(-rows.shape[1] // UNIT_COLUMNS), UNIT_COLUMNS // rows.group
    numbers: list[npt.NDArray[Any]] = [_by_panel(rows.unit, count, blocks).transpose(0, 2, 1).astype(np.float16)]
    by_group = _by_panel(rows.count, count, blocks * per_unit).reshape(count, PANEL, blocks, per_unit)
    numbers.append(by_group.transpose(0, 2, 3, 1))
    if rows.offset_unit is not None and rows.offset_count is not None:
        numbers.insert(1, _by_panel(rows.offset_unit, count, blocks).transpose(0, 2, 1).astype(np.float16))
        pairs = _by_panel(rows.offset_count, count, blocks * per_unit).reshape(count, PANEL, blocks, per_unit // 2, 2)
        numbers.append(pairs.transpose(0, 2, 3, 1, 4))
    parts = [np.ascontiguousarray(each).reshape(count, blocks, -1).view(np.uint8) for each in numbers]
    flat = np.concatenate(parts, axis=2).reshape(count, -1)
    panels[:, HEADER_BYTES : HEADER_BYTES + flat.shape[1]] = flat
    stored = (rows.codes - np.int8(rows.format.codes[0])).view(np.uint8)
    codes = _by_panel(stored, count, blocks * UNIT_COLUMNS).reshape(count, PANEL, -1, 4)
    lines = codes.transpose(0, 2, 1, 3).reshape(count, -1, _LINE)
    packed = gather_lines(lines, rows.format.bits)
    panels[:, panels.shape[1] - packed[0].size :] = packed.reshape(count, -1)


def read_units(panels: Bytes, scale: Float32, k: int, described: WeightFormat, group: int) -> UnitRows:
    """The rows [N, K] that lie in panels. scale: those of all rows [N]."""
    count, blocks, values, per_unit = len(panels), -(-k // UNIT_COLUMNS), described.group_bytes, UNIT_COLUMNS // group
    ends = np.cumsum([2 * PANEL] * values + [per_unit * PANEL] * values)
    stored = panels[:, HEADER_BYTES : HEADER_BYTES + blocks * ends[-1]].reshape(count, blocks, -1)
    parts = [np.ascontiguousarray(each) for each in np.split(stored, ends[:-1], axis=2)]

    def units(part: Bytes) -> Float32:
        by_panel = part.view(np.float16).transpose(0, 2, 1)
        return by_panel.reshape(-1, blocks)[: len(scale)].astype(np.float32)

    def counts(part: Bytes, together: int) -> Int8:
        by_panel = part.view(np.int8).reshape(count, blocks, -1, PANEL, together).transpose(0, 3, 1, 2, 4)
        return np.ascontiguousarray(by_panel.reshape(count * PANEL, -1)[: len(scale), : -(-k // group)])

    code_bytes = blocks * UNIT_COLUMNS * PANEL * described.bits // 8
    lines = panels[:, panels.shape[1] - code_bytes :].reshape(count, -1, _LINE)
    codes = spread_lines(lines, described.bits)
    by_row = codes.reshape(count, -1, PANEL, 4).transpose(0, 2, 1, 3).reshape(count * PANEL, -1)[: len(scale), :k]
    return UnitRows(
        scale=scale,
        codes=np.ascontiguousarray(by_row).view(np.int8) + np.int8(described.codes[0]),
        count=counts(parts[values], 1),
        unit=units(parts[0]),
        offset_count=counts(parts[3], 2) if values > 1 else None,
        offset_unit=units(parts[1]) if values > 1 else None,
        bits=described.bits,
        group=group,
    )


def _by_panel(values: npt.NDArray[Any], count: int, columns: int) -> npt.NDArray[Any]:
    """[N, n] -> [panels, PANEL, columns], with zeros after the last row and column."""
    padded = np.zeros((count * PANEL, columns), values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.reshape(count, PANEL, columns)
