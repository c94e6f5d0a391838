"""Stored codes as blocks of GGUF, which other programs decode to the same values.

    codes                                   blocks
    4 bits, whole numbers                   Q4_0
    4 bits, the levels of IQ4_NL            IQ4_NL
    4 bits, whole zero points               Q4_1, where float16 holds zero point * scale
    8 bits                                  Q8_0

A block has 32 columns and one float16 scale: longer groups repeat theirs.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ingot.builder.stored_codes import Numbers, StoredCodes
from ingot.convert.gguf.blocks import TYPES

BLOCK = 32  # columns
ROWS = 256  # worked on at a time

_TABLES = {each.packing.table: each.name for each in TYPES.values() if each.packing is not None and each.size == BLOCK}


def block_kind(codes: StoredCodes, columns: int) -> tuple[str, str]:
    """(type, "") or ("", why no type holds the codes)"""
    if columns % BLOCK:
        return "", f"a block has {BLOCK} columns, which do not divide {columns}"
    if codes.group < columns and codes.group % BLOCK:
        return "", f"a block has {BLOCK} columns, which do not divide the groups of {codes.group}"
    if codes.table:
        kind = _TABLES.get(codes.table, "")
        return kind, "" if kind else "no type has this table of levels"
    if codes.floats:
        return "", "no type has FP8 codes"
    if codes.bits == 8:
        return "Q8_0", ""
    if codes.zero is not None:
        return ("Q4_1", "") if not codes.signed else ("", "no type has signed codes with zero points")
    return ("Q4_0", "") if codes.signed else ("", "no type has unsigned codes without zero points")


def halves_problem(codes: StoredCodes, rows: int) -> str:
    """Why the scales do not fit float16 exactly; "": they do."""
    for begin in range(0, rows, ROWS):
        end = min(begin + ROWS, rows)
        scale = codes.scale(begin, end)
        if not _exact(scale):
            return "float16 does not hold its scales"
        if codes.zero is not None and not _exact(codes.zero(begin, end) * scale):
            return "float16 does not hold its zero points times scales"
    return ""


def blocks_of(codes: StoredCodes, kind: str, order: npt.NDArray[np.intp]) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes [rows, blocks * bytes] of rows in an order."""
    for begin in range(0, len(order), ROWS):
        wanted = order[begin : begin + ROWS]
        low, high = int(wanted.min()), int(wanted.max()) + 1
        pick = wanted - low
        yield _packed(codes, kind, low, high)[pick]


def _packed(codes: StoredCodes, kind: str, begin: int, end: int) -> npt.NDArray[np.uint8]:
    stored = codes.codes(begin, end)
    n, k = stored.shape
    count = k // BLOCK

    def halves(numbers: Numbers) -> npt.NDArray[np.uint8]:
        spread = np.repeat(numbers, max(1, min(codes.group, k) // BLOCK), axis=1)[:, :count]
        return np.ascontiguousarray(spread.astype("<f2")).reshape(n, count, 1).view(np.uint8)

    scale = codes.scale(begin, end)
    head = [halves(scale)]
    if codes.zero is not None:
        head.append(halves(-codes.zero(begin, end) * scale))
    each = stored.view(np.uint8).reshape(n, count, BLOCK)
    if codes.bits == 4:
        each = each + np.uint8(8) if codes.signed else each
        each = (each[..., :16] & np.uint8(15)) | (each[..., 16:] << np.uint8(4))
    assert kind, "block_kind has found one"
    found: npt.NDArray[np.uint8] = np.concatenate([*head, each], axis=2).reshape(n, -1)
    return found


def _exact(values: Numbers) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())
