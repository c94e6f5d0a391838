"""BitNet's weights of three values, with one scale, as transformers packs them.

weight U8 [N / 4, K]: row n + i * N / 4 in bits 2i and 2i + 1 of row n, a code from 0 on for -1, 0 and 1
weight_scale [1]: `bitlinear` divides by it, `autobitlinear` multiplies by it
"""

import numpy as np

from ingot.configs.read import Section
from ingot.convert.quantised.bits import Bytes
from ingot.convert.quantised.form import Code, Quantised, Rows, value_piece
from ingot.convert.quantised.module import FLOATS, Format, Module
from ingot.dtypes import DType
from ingot.errors import UnsupportedModelError
from ingot.tensor_file import read_rows

_PER_BYTE = 4
_VALUES = (-1.0, 0.0, 1.0, 2.0, *[0.0] * 12)
_CLASSES = ("bitlinear", "autobitlinear")


def read(module: Module) -> Quantised:
    stored = module.part("weight", ("U8",), 2)
    packed, k = stored.shape
    n = packed * _PER_BYTE

    def rows(begin: int, end: int) -> Bytes:
        found = [np.empty((0, k), np.uint8)]
        for place in range(_PER_BYTE):
            low, high = (min(max(at - place * packed, 0), packed) for at in (begin, end))
            if low < high:
                found.append(read_rows(stored, low, high).view(np.uint8) >> np.uint8(2 * place) & np.uint8(3))
        return np.concatenate(found)

    def load() -> Rows:
        return rows

    pieces = {
        "scale": value_piece(DType.F16, (n, 1), lambda: np.ones((n, 1), np.float16), module.where("weight")),
        "factor": module.factor_piece("weight_scale", n, FLOATS),
    }
    divides = _linear_class(module.settings) == "bitlinear"
    if module.bias and not divides:  # transformers multiplies it by the scale of the weight too
        raise UnsupportedModelError(
            "a bias beside BitNet's weights is not supported where linear_class is autobitlinear",
            where=module.where("bias"),
            hint="convert a version of the model with linear_class bitlinear",
        )
    code = Code.integers(4, k, signed=False)
    return module.made((n, k), code, k, load, pieces, table=_VALUES, divides=divides, codes="weight")


def _linear_class(settings: Section) -> str:
    return settings.text("linear_class", "bitlinear")


def _skipped(settings: Section) -> tuple[str, ...]:
    """Also refuses variants: this is asked even if no module has codes."""
    kind, mode = _linear_class(settings), settings.text("quantization_mode", "offline")
    norms = settings.boolean("use_rms_norm", False)
    if kind not in _CLASSES or mode != "offline" or norms:
        raise UnsupportedModelError(
            "this variant of BitNet's quantisation is not supported",
            where=settings.where,
            expected="linear_class bitlinear or autobitlinear, quantization_mode offline, without use_rms_norm",
            got=f"linear_class {kind}, quantization_mode {mode}, use_rms_norm {norms}",
            hint="convert a version of the model whose weights are packed",
        )
    return settings.words("modules_to_not_convert") if settings.has("modules_to_not_convert") else ()


FORMAT = Format(
    names=("bitnet",), marks=("weight_scale",), parts=("weight", "weight_scale"), read=read, skipped=_skipped
)
