"""Packed weights back to float32 arrays in their logical shape."""

import math

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, to_float32
from ingot.errors import EngineError
from ingot.plan import Weight
from ingot.plugins.layouts import deinterleave_gated, num_panels, panel_bytes, panel_layout, unpack_panels
from ingot.plugins.op import Array

_GATED = ".gated"


def read_weight(section: npt.NDArray[np.uint8], weight: Weight) -> Array:
    """float32 of `weight.shape`; a view of the weights section where it is stored so already.

    section  all packed weights of the engine, bytes
    """
    if weight.layout == "row":
        return to_float32(_stored(section, weight, 0), weight.dtype).reshape(weight.shape)
    gated = weight.layout.endswith(_GATED)
    if weight.dtype not in (DType.F32, DType.BF16) or weight.layout.removesuffix(_GATED) != panel_layout(weight.dtype):
        raise EngineError(
            "the ref target cannot read this weight layout", where=weight.name,
            expected=f"row, {panel_layout(DType.F32)} or {panel_layout(DType.BF16)}, and the last two with {_GATED}",
            got=f"{weight.layout} of {weight.dtype.value}",
        )  # fmt: skip
    n, k = weight.shape
    panels = _stored(section, weight, panel_bytes(k, weight.dtype))
    if not gated:
        return to_float32(unpack_panels(panels, n, k, weight.dtype), weight.dtype)
    rows = unpack_panels(panels, 16 * num_panels(n, gated=True), k, weight.dtype)
    return to_float32(deinterleave_gated(rows, n // 2), weight.dtype)


def _stored(section: npt.NDArray[np.uint8], weight: Weight, unit_bytes: int) -> npt.NDArray[np.generic]:
    """The stored elements, pieces joined; unit_bytes of one panel, or 0 where one piece holds the whole."""
    if unit_bytes == 0:
        assert len(weight.pieces) == 1, f"{weight.name}: layout row has one piece"
        begin = weight.pieces[0].offset
        return section[begin : begin + math.prod(weight.shape) * weight.dtype.itemsize].view(weight.dtype.storage)
    parts = [section[p.offset : p.offset + (p.end - p.begin) * unit_bytes] for p in weight.pieces]
    return np.concatenate(parts).view(weight.dtype.storage)
