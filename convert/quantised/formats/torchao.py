"""TorchAO in safetensors: codes a byte each (IntxUnpackedToInt8Tensor, Int8Tensor) or FP8 (Float8Tensor).

_weight_qdata I8 or F8_E4M3 [N, K], _weight_scale [N, G] or [N, 1] or [], _weight_zero_point I8 [N, G]
"""

import math

import numpy as np

from ingot.configs.read import Section
from ingot.convert.quantised.form import Bits, Code, Piece, Quantised, value_piece
from ingot.convert.quantised.module import FLOATS, Format, Module
from ingot.dtypes import DType
from ingot.errors import CheckpointError
from ingot.tensor_file import read_rows

_CODES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"


def read(module: Module) -> Quantised:
    codes = module.part(_CODES, ("I8", "F8_E4M3"), 2)
    n, k = codes.shape
    scale = module.part(_SCALE, FLOATS)
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if groups == 1:
        piece, group = module.blocks_piece(_SCALE, n, k, None)
    else:
        if not 0 < groups <= k or k % groups:
            raise CheckpointError(
                "the scales of a quantised weight do not divide its columns",
                where=f"{scale.file}: {scale.name}",
                expected=f"a divisor of {k}",
                got=f"{groups} a row",
            )
        module.require(_SCALE, (n, groups))
        piece, group = module.scale_piece(_SCALE, (n, groups)), k // groups
    code = Code.I8 if codes.dtype_name == "I8" else Code.F8
    pieces = {"scale": piece, "zero": _zero(module, piece.shape)}
    return module.made((n, k), code, group, module.stored_codes(_CODES), pieces, codes=_CODES)


def _zero(module: Module, shape: tuple[int, ...]) -> Piece | None:
    if not module.has(_ZERO):
        return None
    tensor = module.part(_ZERO, ("I8",))
    if math.prod(tensor.shape) != math.prod(shape):
        module.require(_ZERO, shape)

    def load() -> Bits:
        return read_rows(tensor).reshape(shape).view(np.uint8)

    return value_piece(DType.I8, shape, load, module.where(_ZERO))


def _skipped(settings: Section) -> tuple[str, ...]:
    return settings.words("modules_to_not_convert") if settings.has("modules_to_not_convert") else ()


FORMAT = Format(names=("torchao",), marks=(_CODES,), parts=(_CODES, _SCALE, _ZERO), read=read, skipped=_skipped)
