"""The instructions of matrix units: how the 32 lanes of a warp hold what they multiply, by the PTX manual."""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

_LANE = np.arange(32)
_ROW, _PAIR = _LANE // 4, 2 * (_LANE % 4)


def spread_matrix(rows: npt.NDArray[np.uint16], *, transposed: bool) -> Words:
    """What each lane gets of an 8x8 matrix: [warps, 8, 8] → [warps, 32], two neighbours each."""
    if transposed:
        rows = rows.swapaxes(1, 2)
    low, high = (rows[:, _ROW, _PAIR + odd].astype(np.uint32) for odd in (0, 1))
    return low | high << np.uint32(16)


def multiply_16_8_16(a: list[Words], b: list[Words], c: list[Floats], kind: str) -> list[Floats]:
    """mma.m16n8k16 with float32 sums: fragments [warps, 32] each."""
    left, right = np.zeros((len(a[0]), 16, 16), np.float32), np.zeros((len(a[0]), 16, 8), np.float32)
    total = np.zeros((len(a[0]), 16, 8), np.float32)
    for index, word in enumerate(a):
        for odd, value in enumerate(halves(word, kind)):
            left[:, _ROW + 8 * (index % 2), _PAIR + odd + 8 * (index // 2)] = value
    for index, word in enumerate(b):
        for odd, value in enumerate(halves(word, kind)):
            right[:, _PAIR + odd + 8 * index, _ROW] = value
    for index, value in enumerate(c):
        total[:, _ROW + 8 * (index // 2), _PAIR + index % 2] = value
    total += left @ right
    return [total[:, _ROW + 8 * (index // 2), _PAIR + index % 2] for index in range(4)]


def halves(word: Words, kind: str) -> tuple[Any, Any]:
    """Both numbers of each word, as float32."""
    low, high = word & np.uint32(0xFFFF), word >> np.uint32(16)
    if kind == "bf16":
        return (low << np.uint32(16)).view(np.float32), (high << np.uint32(16)).view(np.float32)
    return tuple(half.astype(np.uint16).view(np.float16).astype(np.float32) for half in (low, high))  # type: ignore[return-value]
