"""Packed weights back to numpy arrays in their logical shape."""

import math

import numpy as np
import numpy.typing as npt

from ingot.dtypes import STORED, DType, Precision, to_float32
from ingot.errors import EngineError
from ingot.plan import Weight
from ingot.plugins.f8_rows import F8Rows, stacked_f8
from ingot.plugins.grouped import GroupedRows, stacked_grouped
from ingot.plugins.layouts import (
    ROW,
    ROW_W8,
    deinterleave_gated,
    deinterleave_quantised,
    group_of,
    num_panels,
    panel_bytes,
    panel_layout,
    row_bytes,
    unpack_f8,
    unpack_grouped,
    unpack_panels,
    unpack_quantised,
    unpack_table,
    unpack_units,
)
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows, stacked
from ingot.plugins.unit_rows import UnitRows, stacked_units
from ingot.plugins.weight_rows import WeightRows
from ingot.weight_formats import PANEL

_GATED = ".gated"
_GROUPED = (DType.W2T, DType.W3T, DType.W4T, DType.W4TS, DType.W8T, DType.W8TS)


def read_weight(section: npt.NDArray[np.uint8], weight: Weight) -> Array | WeightRows:
    """float32 of `weight.shape`, a view of the weights section where it is stored so already; or quantised rows.

    section  all packed weights of the engine, bytes
    """
    if weight.layout in (ROW, ROW_W8) and weight.dtype.is_quantised == (weight.layout == ROW_W8):
        return _read_rows(section, weight)
    *experts, n, k = weight.shape
    gated, group = weight.layout.endswith(_GATED), group_of(weight.layout)
    known = weight.dtype is not DType.F16 and str(Precision(dtype=weight.dtype, group=group)) in STORED
    if not known or weight.layout.removesuffix(_GATED) != panel_layout(weight.dtype, group):
        raise EngineError(
            "the ref target cannot read this weight layout",
            where=weight.name,
            expected=f"row, row.w8, or {panel_layout(DType.F32)} and the like of bf16, w8, w4g32, also with {_GATED}",
            got=f"{weight.layout} of {weight.dtype.value}",
        )
    packed = _joined(section, weight, math.prod(experts), panel_bytes(k, weight.dtype, group))
    if weight.dtype.is_quantised:
        rows = [_quantised(panels, n, k, weight.dtype, group, gated=gated) for panels in packed]
        return _stacked(rows) if experts else rows[0]
    matrices = [_unpacked(panels, n, k, weight.dtype, gated=gated) for panels in packed]
    return to_float32(np.stack(matrices).reshape(weight.shape), weight.dtype.numbers)


def _read_rows(section: npt.NDArray[np.uint8], weight: Weight) -> Array | WeightRows:
    assert len(weight.pieces) == 1, f"{weight.name}: rows are one piece"
    cols = math.prod(weight.shape[1:])
    begin = weight.pieces[0].offset
    stored = section[begin : begin + weight.shape[0] * row_bytes(cols, weight.dtype)]
    if weight.dtype.is_quantised:
        return unpack_table(stored, cols)
    return to_float32(stored.view(weight.dtype.storage), weight.dtype).reshape(weight.shape)


def _unpacked(panels: npt.NDArray[np.uint8], n: int, k: int, dtype: DType, *, gated: bool) -> npt.NDArray[np.generic]:
    """[n, k] stored bits of one matrix."""
    stored = panels.view(dtype.storage)
    if not gated:
        return unpack_panels(stored, n, k, dtype)
    return deinterleave_gated(unpack_panels(stored, PANEL * num_panels(n, gated=True), k, dtype), n // 2)


def _quantised(panels: npt.NDArray[np.uint8], n: int, k: int, dtype: DType, group: int, *, gated: bool) -> WeightRows:
    """The rows [n, k] of one matrix."""
    packed_n = PANEL * num_panels(n, gated=True) if gated else n
    if dtype in _GROUPED:
        kept = unpack_grouped(panels, packed_n, k, dtype, group)
        return deinterleave_quantised(kept, n // 2) if gated else kept
    if dtype.has_units:
        in_units = unpack_units(panels, packed_n, k, dtype, group)
        return deinterleave_quantised(in_units, n // 2) if gated else in_units
    if dtype is DType.F8:
        numbers = unpack_f8(panels, packed_n, k, group)
        return deinterleave_quantised(numbers, n // 2) if gated else numbers
    rows = unpack_quantised(panels, packed_n, k, group)
    return deinterleave_quantised(rows, n // 2) if gated else rows


def _stacked(experts: list[WeightRows]) -> WeightRows:
    grouped = [each for each in experts if isinstance(each, GroupedRows)]
    quantised = [each for each in experts if isinstance(each, QuantisedRows)]
    floats = [each for each in experts if isinstance(each, F8Rows)]
    if in_units := [each for each in experts if isinstance(each, UnitRows)]:
        return stacked_units(in_units)
    return stacked_grouped(grouped) if grouped else stacked_f8(floats) if floats else stacked(quantised)


def _joined(section: npt.NDArray[np.uint8], weight: Weight, experts: int, unit_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of each expert, pieces joined: [experts, ...]; a weight without experts counts as one."""
    parts = [
        section[p.offset : p.offset + experts * (p.end - p.begin) * unit_bytes].reshape(experts, -1)
        for p in weight.pieces
    ]
    return np.concatenate(parts, axis=1)
