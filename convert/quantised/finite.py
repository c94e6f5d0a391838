"""Scales so large that float32 cannot hold what they multiply: refused while a weight is read.

No value of the weight is computed: its largest scale times the largest value of a code is a bound of all of them.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from ingot.convert.quantised.form import Bits, Code, Piece, Quantised, unit_of
from ingot.dtypes import to_float32
from ingot.errors import CheckpointError

_MOST = float(np.finfo(np.float32).max)
_LARGEST = {Code.U4: 15.0, Code.I4: 8.0, Code.U8: 255.0, Code.I8: 128.0, Code.F8: 448.0}


def with_finite_values(weight: Quantised) -> Quantised:
    """The weight; reading its scales raises CheckpointError where they are too large. Offsets are not looked at: only
    GGUF has them, and there they are float16 numbers times bytes."""
    kind = unit_of("scale") if unit_of("scale") in weight.pieces else "scale"
    piece = weight.pieces[kind]

    def read() -> Iterator[Bits]:
        largest = _largest(weight) * (255 if kind != "scale" else 1)
        for block in piece.read():
            found = np.abs(to_float32(block.view(piece.dtype.storage), piece.dtype))
            if found.size and (top := float(found.max())) * largest > _MOST:
                raise CheckpointError(
                    "the scales of a quantised weight are so large that its values are infinite in float32",
                    where=piece.where or f"{weight.file}: {weight.name}",
                    expected=f"at most {_MOST / largest:.3g}, which codes and factors multiply by up to {largest:.3g}",
                    got=f"{top:.3g}",
                    hint="download the model again; the file may have been damaged when it was made",
                )
            yield block

    return dataclasses.replace(weight, pieces={**weight.pieces, kind: dataclasses.replace(piece, read=read)})


def _largest(weight: Quantised) -> float:
    """What a scale may be multiplied with: a code less its zero point, and factors of its row and column."""
    value = max(map(abs, weight.table)) if weight.table else _LARGEST[weight.code]
    if "zero" in weight.pieces:
        value += _top(weight.pieces["zero"])
    factor = 1 / _top(weight.pieces["factor"], least=True) if weight.divides else _top(weight.pieces.get("factor"))
    return value * max(1.0, factor, factor * _top(weight.pieces.get("columns")))


def _top(piece: Piece | None, *, least: bool = False) -> float:
    """The largest magnitude of a piece, or the smallest; 1 if the weight has no such piece."""
    if piece is None:
        return 1.0
    choose = np.min if least else np.max
    numbers = (np.abs(to_float32(block.view(piece.dtype.storage), piece.dtype)) for block in piece.read())
    found = [float(choose(each)) for each in numbers if each.size]
    return float(choose(found)) if found else 1.0
