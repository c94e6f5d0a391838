"""Packed weights back to numpy arrays in their logical shape."""

import math

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, to_float32
from ingot.errors import EngineError
from ingot.plan import Weight
from ingot.plugins.layouts import (
    PANEL,
    ROW,
    ROW_W8,
    deinterleave_gated,
    deinterleave_quantised,
    group_of,
    num_panels,
    panel_bytes,
    panel_layout,
    row_bytes,
    unpack_panels,
    unpack_quantised,
    unpack_table,
)
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows

_GATED = ".gated"


def read_weight(section: npt.NDArray[np.uint8], weight: Weight) -> Array | QuantisedRows:
    """float32 of `weight.shape`, a view of the weights section where it is stored so already; or quantised rows.

    section  all packed weights of the engine, bytes
    """
    n, k = weight.shape if len(weight.shape) == 2 else (math.prod(weight.shape), 1)
    if weight.layout == ROW and not weight.dtype.is_quantised:
        return to_float32(_stored(section, weight, k * weight.dtype.itemsize), weight.dtype).reshape(weight.shape)
    if weight.layout == ROW_W8 and weight.dtype is DType.W8:
        return unpack_table(_stored(section, weight, row_bytes(k, weight.dtype)).view(np.uint8), k)
    return _read_panels(section, weight, n, k)


def _read_panels(section: npt.NDArray[np.uint8], weight: Weight, n: int, k: int) -> Array | QuantisedRows:
    gated, group = weight.layout.endswith(_GATED), group_of(weight.layout)
    known = weight.dtype in (DType.F32, DType.BF16, DType.W8, DType.W4) and (group > 0) == (weight.dtype is DType.W4)
    if not known or weight.layout.removesuffix(_GATED) != panel_layout(weight.dtype, group):
        raise EngineError(
            "the ref target cannot read this weight layout", where=weight.name,
            expected=f"row, row.w8, or {panel_layout(DType.F32)} and the like of bf16, w8, w4g32, also with {_GATED}",
            got=f"{weight.layout} of {weight.dtype.value}",
        )  # fmt: skip
    panels = _stored(section, weight, panel_bytes(k, weight.dtype, group))
    rows = PANEL * num_panels(n, gated=True) if gated else n
    if weight.dtype.is_quantised:
        quantised = unpack_quantised(panels.view(np.uint8), rows, k, group)
        return deinterleave_quantised(quantised, n // 2) if gated else quantised
    stored = unpack_panels(panels, rows, k, weight.dtype)
    return to_float32(deinterleave_gated(stored, n // 2) if gated else stored, weight.dtype)


def _stored(section: npt.NDArray[np.uint8], weight: Weight, unit_bytes: int) -> npt.NDArray[np.generic]:
    """The stored elements, pieces joined; unit_bytes: of one panel or row."""
    parts = [section[p.offset : p.offset + (p.end - p.begin) * unit_bytes] for p in weight.pieces]
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(weight.dtype.storage)
