"""How weights lie in an Engine: the packed layouts, with pack and unpack in numpy (the definition for every kernel).

    row           C order, as in the checkpoint
    panel16.f32   [ceil(N/16)][K][16]               f32: 16 output columns side by side, K rows
    panel16.bf16  [ceil(N/16)][ceil(K/32)*16][16][2] bf16: pairs of K rows interleaved, K padded to 32 with zeros.
                  1 KiB (16 pair rows x 64 bytes) is exactly one AMX tile; a 64-byte row is also what AVX-512 and
                  AVX2 kernels read: low halves are the even k of 16 columns, high halves the odd k.

N is padded to a multiple of 16 with zeros. A gated product (gate and up of an MLP) alternates panels:
panel 2p holds gate columns 16p .. 16p+15 and panel 2p+1 the up columns of the same numbers, each padded by itself.
Experts are packed one by one: a piece of their weight [experts, N, K] holds its panels of each, one after the other.
"""

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType

PANEL = 16  # output columns per panel
K_BLOCK = {DType.F32: 1, DType.BF16: 32}  # K is padded to a multiple of this


def panel_layout(dtype: DType) -> str:
    """Name of the panel layout of `dtype`."""
    return f"panel{PANEL}.{dtype.value}"


def padded_k(k: int, dtype: DType) -> int:
    return -(-k // K_BLOCK[dtype]) * K_BLOCK[dtype]


def num_panels(n: int, *, gated: bool = False) -> int:
    """Panels of a product with n weight rows; gated: n counts gate and up rows together."""
    return 2 * -(-(n // 2) // PANEL) if gated else -(-n // PANEL)


def panel_bytes(k: int, dtype: DType) -> int:
    return PANEL * padded_k(k, dtype) * dtype.itemsize


def pack_panels(rows: npt.NDArray[np.generic], dtype: DType) -> npt.NDArray[np.generic]:
    """[n, K] stored bits of `dtype` (n <= any) → [ceil(n/16), ...] panels, C-contiguous."""
    n, k = rows.shape
    panels = -(-n // PANEL)
    padded = np.zeros((panels * PANEL, padded_k(k, dtype)), dtype=dtype.storage)
    padded[:n, :k] = rows
    tiles = padded.reshape(panels, PANEL, -1)
    if dtype is DType.F32:
        return np.ascontiguousarray(tiles.transpose(0, 2, 1))
    return np.ascontiguousarray(tiles.reshape(panels, PANEL, -1, 2).transpose(0, 2, 1, 3))


def unpack_panels(panels: npt.NDArray[np.generic], n: int, k: int, dtype: DType) -> npt.NDArray[np.generic]:
    """Inverse of `pack_panels`: any array holding the packed elements → [n, K] stored bits."""
    flat = panels.reshape(-1, padded_k(k, dtype) * PANEL)
    if dtype is DType.F32:
        rows = flat.reshape(len(flat), -1, PANEL).transpose(0, 2, 1)
    else:
        rows = flat.reshape(len(flat), -1, PANEL, 2).transpose(0, 2, 1, 3).reshape(len(flat), PANEL, -1)
    return np.ascontiguousarray(rows.reshape(len(flat) * PANEL, -1)[:n, :k])


def interleave_gated(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[2I, K] (gate rows, then up rows) → [2 * ceil(I/16) * 16, K] with alternating groups of 16, zero padded."""
    half, k = rows.shape[0] // 2, rows.shape[1]
    padded = -(-half // PANEL) * PANEL
    pair = np.zeros((2, padded, k), dtype=rows.dtype)
    pair[0, :half], pair[1, :half] = rows[:half], rows[half:]
    return np.ascontiguousarray(pair.reshape(2, -1, PANEL, k).transpose(1, 0, 2, 3).reshape(2 * padded, k))


def deinterleave_gated(rows: npt.NDArray[np.generic], half: int) -> npt.NDArray[np.generic]:
    """Inverse of `interleave_gated` for I = half."""
    k = rows.shape[1]
    pair = rows.reshape(-1, 2, PANEL, k).transpose(1, 0, 2, 3).reshape(2, -1, k)
    return np.ascontiguousarray(np.concatenate([pair[0, :half], pair[1, :half]]))
