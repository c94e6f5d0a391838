"""MXFP4 as gpt-oss stores it: stacks of experts, each matrix in blocks of 32 codes E2M1 that share an exponent.

    NAME_blocks U8 [E, N, K/32, 16], NAME_scales U8 [E, N, K/32]      E experts; 2^(scale - 127)

NAME is the stack [E, N, K]. Byte b of a block holds its elements 2b (low half) and 2b + 1. Rows of gpt-oss's
gate_up_proj alternate gate and up: a family's row says `Unpair(Take(NAME), heads=0)`.
"""

import dataclasses

import numpy as np

from ingot.configs.read import Section
from ingot.convert.quantised.bits import exponents_as_bf16, nibbles
from ingot.convert.quantised.form import Bits, Code, Quantised, Rows, streamed_piece
from ingot.convert.quantised.formats.fp4 import E2M1
from ingot.convert.quantised.module import Format, Module
from ingot.dtypes import DType
from ingot.tensor_file import read_rows

_GROUP = 32


def read(module: Module) -> Quantised:
    blocks, scales = module.part("blocks", ("U8",), 4), module.part("scales", ("U8",), 3)
    experts, rows, groups, _ = blocks.shape
    module.require("blocks", (experts, rows, groups, _GROUP // 2))
    module.require("scales", (experts, rows, groups))
    flat = dataclasses.replace(blocks, shape=(experts * rows, groups * _GROUP // 2))
    exponents = dataclasses.replace(scales, shape=(experts * rows, groups))

    def codes() -> Rows:
        return lambda begin, end: nibbles(read_rows(flat, begin, end).view(np.uint8))

    def scale(begin: int, end: int) -> Bits:
        return exponents_as_bf16(read_rows(exponents, begin, end).view(np.uint8))

    shape = (experts * rows, groups * _GROUP)
    pieces = {"scale": streamed_piece(DType.BF16, (shape[0], groups), scale, module.where("scales"))}
    made = module.made(shape, Code.U4, _GROUP, codes, pieces, table=E2M1, codes="blocks")
    return dataclasses.replace(made, name=module.name, shape=(experts, rows, shape[1]))


def _skipped(settings: Section) -> tuple[str, ...]:
    return settings.words("modules_to_not_convert") if settings.has("modules_to_not_convert") else ()


FORMAT = Format(names=("mxfp4",), marks=("blocks",), parts=("blocks", "scales"), read=read, skipped=_skipped, joint="_")
