"""The instructions of matrix units: how the 32 lanes of a warp hold what they multiply, by the PTX manual."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, to_float32

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


def multiply_16_8(a: list[Words], b: list[Words], c: list[Floats], kind: str) -> list[Floats]:
    """mma.m16n8k16, of FP8 m16n8k32, with float32 sums: fragments [warps, 32] each. A word has neighbouring k, two or
    four."""
    each = 4 if kind == "e4m3" else 2
    warps, half, first = len(a[0]), 4 * each, each * (_LANE % 4)  # k of half of an instruction, the lane's first
    left, right = np.zeros((warps, 16, 2 * half), np.float32), np.zeros((warps, 2 * half, 8), np.float32)
    total = np.zeros((warps, 16, 8), np.float32)
    for index, word in enumerate(a):
        for place, value in enumerate(numbers(word, kind)):
            left[:, _ROW + 8 * (index % 2), first + place + half * (index // 2)] = value
    for index, word in enumerate(b):
        for place, value in enumerate(numbers(word, kind)):
            right[:, first + place + half * index, _ROW] = value
    for index, value in enumerate(c):
        total[:, _ROW + 8 * (index // 2), _PAIR + index % 2] = value
    total += left @ right
    return [total[:, _ROW + 8 * (index // 2), _PAIR + index % 2] for index in range(4)]


def numbers(word: Words, kind: str) -> tuple[Any, ...]:
    """All numbers of each word, as float32."""
    if kind != "e4m3":
        return halves(word, kind)
    return tuple(to_float32((word >> np.uint32(8 * i)).astype(np.uint8), DType.F8) for i in range(4))


def halves(word: Words, kind: str) -> tuple[Any, Any]:
    """Both numbers of each word, as float32."""
    low, high = word & np.uint32(0xFFFF), word >> np.uint32(16)
    if kind == "bf16":
        return (low << np.uint32(16)).view(np.float32), (high << np.uint32(16)).view(np.float32)
    return tuple(half.astype(np.uint16).view(np.float16).astype(np.float32) for half in (low, high))  # type: ignore[return-value]
