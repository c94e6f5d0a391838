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
        assert len(weight.pieces) == 1, f"{weight.name}: layout row has one piece"
        begin = weight.pieces[0].offset
        bits = section[begin : begin + math.prod(weight.shape) * weight.dtype.itemsize].view(weight.dtype.storage)
        return to_float32(bits, weight.dtype).reshape(weight.shape)
    gated = weight.layout.endswith(_GATED)
    if weight.dtype not in (DType.F32, DType.BF16) or weight.layout.removesuffix(_GATED) != panel_layout(weight.dtype):
        raise EngineError(
            "the ref target cannot read this weight layout", where=weight.name,
            expected=f"row, {panel_layout(DType.F32)} or {panel_layout(DType.BF16)}, and the last two with {_GATED}",
            got=f"{weight.layout} of {weight.dtype.value}",
        )  # fmt: skip
    *experts, n, k = weight.shape
    packed = _joined(section, weight, math.prod(experts), panel_bytes(k, weight.dtype))
    matrices = [_unpacked(panels, n, k, weight.dtype, gated=gated) for panels in packed]
    return to_float32(np.stack(matrices).reshape(weight.shape), weight.dtype)


def _unpacked(panels: npt.NDArray[np.generic], n: int, k: int, dtype: DType, *, gated: bool) -> npt.NDArray[np.generic]:
    """[n, k] stored bits of one matrix."""
    if not gated:
        return unpack_panels(panels, n, k, dtype)
    return deinterleave_gated(unpack_panels(panels, 16 * num_panels(n, gated=True), k, dtype), n // 2)


def _joined(section: npt.NDArray[np.uint8], weight: Weight, experts: int, unit_bytes: int) -> npt.NDArray[np.generic]:
    """The stored elements of each expert, pieces joined: [experts, ...]; a weight without experts counts as one."""
    parts = [
        section[p.offset : p.offset + experts * (p.end - p.begin) * unit_bytes].reshape(experts, -1)
        for p in weight.pieces
    ]
    return np.concatenate(parts, axis=1).view(weight.dtype.storage)
