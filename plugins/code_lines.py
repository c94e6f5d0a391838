"""Codes of few bits, several to a byte: how lines of them lie together.

A line has four codes of each column of a panel, a byte each. Codes of two, three or four bits have their low bits, two
or four, with those of other lines in one line, and further bits in another.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def gather_lines(lines: Bytes, bits: int) -> Bytes:
    """Lines of codes [panels, lines, bytes] -> as few lines as hold them, low bits first."""
    low_bits, upper_bits = _bits(bits)
    packed = _gathered(lines & np.uint8((1 << low_bits) - 1), low_bits)
    if not upper_bits:
        return packed
    upper = _gathered(lines >> np.uint8(low_bits), upper_bits)
    by_upper = packed.reshape(*upper.shape[:2], low_bits // upper_bits, -1)
    together = np.concatenate([by_upper, upper[:, :, None]], axis=2)
    return together.reshape(len(lines), -1, lines.shape[2])


def spread_lines(lines: Bytes, bits: int) -> Bytes:
    """The inverse of `gather_lines`."""
    low_bits, upper_bits = _bits(bits)
    size = lines.shape[2]
    if not upper_bits:
        return _spread(lines, low_bits).reshape(len(lines), -1, size)
    by_upper = lines.reshape(len(lines), -1, low_bits // upper_bits + 1, size)
    upper = _spread(by_upper[:, :, -1], upper_bits)
    codes = _spread(by_upper[:, :, :-1], low_bits).reshape(upper.shape) | upper << np.uint8(low_bits)
    return codes.reshape(len(lines), -1, size)


def _bits(bits: int) -> tuple[int, int]:
    """Those of a code that lie in lines of low bits, and those in lines of upper bits."""
    low = 2 if bits < 4 else 4
    return low, bits - low


def _gathered(lines: Bytes, bits: int) -> Bytes:
    """[panels, lines, bytes], as many in one as bytes hold."""
    places = _places(bits)
    found: Bytes = np.bitwise_or.reduce(lines.reshape(len(lines), -1, len(places), lines.shape[2]) << places, axis=2)
    return found


def _spread(lines: Bytes, bits: int) -> Bytes:
    """[..., bytes] -> [..., codes of a byte, bytes]"""
    codes: Bytes = lines[..., None, :] >> _places(bits) & np.uint8((1 << bits) - 1)
    return codes


def _places(bits: int) -> npt.NDArray[Any]:
    """Where codes of so few bits begin in a byte, [codes, 1]."""
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]
