"""AWQ, version gemm.

    qweight I32 [K, N/8], qzeros I32 [G, N/8], scales [G, N]

Nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight. Without zero points codes are 8 too high.
"""

import numpy as np

from ingot.configs.read import Section
from ingot.convert.quantised.bits import Bytes, nibbles
from ingot.convert.quantised.form import Bits, Code, Quantised, Rows, value_piece
from ingot.convert.quantised.module import FLOATS, Format, Module, unsupported
from ingot.dtypes import DType
from ingot.tensor_file import read_rows

_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # of a word, in the order of columns


def _plain(words: Bits) -> Bytes:
    """Words [n, m] → codes [8 m, n]."""
    found = nibbles(np.ascontiguousarray(words).view(np.uint8)).reshape(len(words), -1, 8)[..., _NIBBLES]
    return found.reshape(len(words), -1).T


def read(module: Module) -> Quantised:
    settings = module.settings
    if settings.text("version", "gemm").lower() != "gemm":
        raise unsupported("AWQ of this version is not supported", settings, "version", "gemm")
    if settings.integer("bits", settings.integer("w_bit", 4)) != 4:
        raise unsupported("AWQ with this number of bits is not supported", settings, "bits", "4")
    return read_awq(module, settings.integer("group_size", settings.integer("q_group_size", 128), minimum=-1))


def read_awq(module: Module, group_size: int) -> Quantised:
    """The packing alone, which AutoRound writes too."""
    words = module.part("qweight", ("I32",), 2)
    k, n = words.shape[0], words.shape[1] * 8
    scales = module.part("scales", FLOATS, 2)
    module.require("scales", (scales.shape[0], n))
    group = module.group(group_size, k, "scales", 0)
    zeros = module.has("qzeros")
    if zeros or module.settings.boolean("zero_point", True):
        tensor = module.part("qzeros", ("I32",), 2)
        module.require("qzeros", (scales.shape[0], words.shape[1]))
    centre = np.uint8(0 if zeros else 8)

    def load() -> Rows:
        held = read_rows(words)
        return lambda begin, end: _plain(held[:, begin // 8 : -(-end // 8)])[begin % 8 :][: end - begin] - centre

    shape = (n, scales.shape[0])
    zero = value_piece(DType.U8, shape, lambda: _plain(read_rows(tensor)), module.where("qzeros")) if zeros else None
    code = Code.integers(4, k, signed=not zeros)
    pieces = {"scale": module.scale_piece("scales", shape, lambda bits: bits.T), "zero": zero}
    return module.made((n, k), code, group, load, pieces, memory=words.nbytes, codes="qweight")


def _skipped(settings: Section) -> tuple[str, ...]:
    return settings.words("modules_to_not_convert") if settings.has("modules_to_not_convert") else ()


FORMAT = Format(names=("awq",), marks=("qweight",), parts=("qweight", "qzeros", "scales"), read=read, skipped=_skipped)
