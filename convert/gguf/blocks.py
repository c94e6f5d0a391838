"""The types of GGUF tensors: floats, and blocks of codes with their scales, as ggml packs them.

    w = q * scale (+ offset), or table[q] * scale          16 or 32 neighbours share scale and offset, or more

Blocks of 256 have scales within scales: d is a float16, the unit of integers of 4 to 8 bits, one for each group. Bits
of a block, from its first byte: below, beside each reader (B: blocks).
"""

import dataclasses

import numpy as np

from ingot.convert.gguf import codebook_types
from ingot.convert.gguf.packing import Array, Packing, Raw, half, halves, negative_half, planes, signed, stored_half
from ingot.convert.quantised.form import Code
from ingot.convert.quantised.formats.fp4 import E2M1
from ingot.dtypes import DType
from ingot.errors import UnsupportedModelError

# What IQ4_NL and IQ4_XS mean by a code: part of their format.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockType:
    """size: elements of a block. nbytes: of a block. dtype: its safetensors name if it is a float."""

    name: str
    size: int
    nbytes: int
    dtype: str = ""
    packing: Packing | None = None


def _fifth_bits(raw: Raw, at: int) -> Array:
    """u32 → bits [B, 32], shifted to the place of the fifth."""
    return np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q3(raw: Raw) -> Array:
    """32 B third bits, 64 B low bits."""
    low, high = planes(raw[:, 32:96], 32, 2), planes(raw[:, :32], 32, 1)
    return signed(low | high << np.uint8(2), 4)


def _q3_scale(raw: Raw) -> Array:
    """12 B at 96: 16 low nibbles, then 16 fields of two bits; d at 108."""
    six = halves(raw[:, 96:104]) | planes(raw[:, 104:108], 4, 2) << np.uint8(4)
    return signed(six, 32)


def _k_scale(raw: Raw) -> Array:
    """12 B at 4: scale and minimum of 8 groups; the last four have their upper bits in the first four's bytes."""
    a, c = raw[:, 4:8], raw[:, 12:16]
    return np.concatenate([a & 63, (c & 15) | (a >> 2 & 48)], axis=1)


def _k_minimum(raw: Raw) -> Array:
    b, c = raw[:, 8:12], raw[:, 12:16]
    return np.concatenate([b & 63, (c >> 4) | (b >> 2 & 48)], axis=1)


def _q6(raw: Raw) -> Array:
    """128 B low nibbles, 64 B high bits, two each."""
    return signed(planes(raw[:, :128], 64, 4) | planes(raw[:, 128:192], 32, 2) << np.uint8(4), 32)


def _iq4_xs_scale(raw: Raw) -> Array:
    """u16 of the high bits, 4 B of the low nibbles, one after the other."""
    low = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], axis=2).reshape(len(raw), 8)
    high = np.ascontiguousarray(raw[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return signed(low | high.astype(np.uint8) << np.uint8(4), 32)


def _exponent(raw: Raw) -> Array:
    """2^(e - 128) as bf16, whose smallest are subnormal; 255, which is NaN, becomes an infinity."""
    stored = raw[:, :1].astype(np.uint16)
    found = np.where(stored < 2, 0x20 << stored, stored - 1 << 7)
    return np.where(stored == 255, 0x7F80, found).astype(np.uint16)


_BY_32: dict[str, Packing] = {
    # d, 16 B
    "Q4_0": Packing(
        code=Code.I4,
        group=32,
        codes=lambda raw: signed(halves(raw[:, 2:]), 8),
        scale=stored_half(0),
        scale_dtype=DType.F16,
    ),
    # d, m, 16 B
    "Q4_1": Packing(
        code=Code.U4,
        group=32,
        codes=lambda raw: halves(raw[:, 4:]),
        scale=stored_half(0),
        scale_dtype=DType.F16,
        offset=lambda raw: half(raw, 2),
    ),
    # d, u32 of the fifth bits, 16 B
    "Q5_0": Packing(
        code=Code.I8,
        group=32,
        codes=lambda raw: signed(halves(raw[:, 6:]) | _fifth_bits(raw, 2), 16),
        scale=stored_half(0),
        scale_dtype=DType.F16,
    ),
    # d, m, u32 of the fifth bits, 16 B
    "Q5_1": Packing(
        code=Code.I8,
        group=32,
        codes=lambda raw: signed(halves(raw[:, 8:]) | _fifth_bits(raw, 4), 0),
        scale=stored_half(0),
        scale_dtype=DType.F16,
        offset=lambda raw: half(raw, 2),
    ),
    # d, 32 B
    "Q8_0": Packing(
        code=Code.I8, group=32, codes=lambda raw: raw[:, 2:].view(np.int8), scale=stored_half(0), scale_dtype=DType.F16
    ),
    # d, 16 B
    "IQ4_NL": Packing(
        code=Code.U4,
        group=32,
        codes=lambda raw: halves(raw[:, 2:]),
        scale=stored_half(0),
        scale_dtype=DType.F16,
        table=_IQ4,
    ),
    # exponent, 16 B; twice E2M1, so that half of the largest power of two is a scale
    "MXFP4": Packing(
        code=Code.U4,
        group=32,
        codes=lambda raw: halves(raw[:, 1:]),
        scale=_exponent,
        scale_dtype=DType.BF16,
        table=tuple(2 * value for value in E2M1),
    ),
}
_BY_256: dict[str, Packing] = {
    # 16 B of scale (low nibble) and minimum, 64 B, d, dmin
    "Q2_K": Packing(
        code=Code.U4,
        group=16,
        codes=lambda raw: planes(raw[:, 16:80], 32, 2),
        scale=lambda raw: raw[:, :16] & 15,
        scale_dtype=DType.U8,
        scale_unit=stored_half(80),
        offset=lambda raw: raw[:, :16] >> 4,
        offset_dtype=DType.U8,
        offset_unit=negative_half(82),
    ),
    "Q3_K": Packing(
        code=Code.I4, group=16, codes=_q3, scale=_q3_scale, scale_dtype=DType.I8, scale_unit=stored_half(108)
    ),
    # d, dmin, 12 B, 128 B
    "Q4_K": Packing(
        code=Code.U4,
        group=32,
        codes=lambda raw: planes(raw[:, 16:], 32, 4),
        scale=_k_scale,
        scale_dtype=DType.U8,
        scale_unit=stored_half(0),
        offset=_k_minimum,
        offset_dtype=DType.U8,
        offset_unit=negative_half(2),
    ),
    # d, dmin, 12 B, 32 B of fifth bits, 128 B
    "Q5_K": Packing(
        code=Code.I8,
        group=32,
        codes=lambda raw: signed(planes(raw[:, 48:], 32, 4) | planes(raw[:, 16:48], 32, 1) << np.uint8(4), 0),
        scale=_k_scale,
        scale_dtype=DType.U8,
        scale_unit=stored_half(0),
        offset=_k_minimum,
        offset_dtype=DType.U8,
        offset_unit=negative_half(2),
    ),
    "Q6_K": Packing(
        code=Code.I8,
        group=16,
        codes=_q6,
        scale=lambda raw: raw[:, 192:208].view(np.int8),
        scale_dtype=DType.I8,
        scale_unit=stored_half(208),
    ),
    **codebook_types.BY_256,
    # d, 2 B, 4 B, 128 B
    "IQ4_XS": Packing(
        code=Code.U4,
        group=32,
        codes=lambda raw: planes(raw[:, 8:], 16, 4),
        scale=_iq4_xs_scale,
        scale_dtype=DType.I8,
        scale_unit=stored_half(0),
        table=_IQ4,
    ),
}
_BY_SIZE = {32: _BY_32, 64: codebook_types.BY_64, 128: codebook_types.BY_128, 256: _BY_256}
# number in the file → (name, bytes of a block)
_NUMBERS = {
    2: ("Q4_0", 18),
    3: ("Q4_1", 20),
    6: ("Q5_0", 22),
    7: ("Q5_1", 24),
    8: ("Q8_0", 34),
    10: ("Q2_K", 84),
    11: ("Q3_K", 110),
    12: ("Q4_K", 144),
    13: ("Q5_K", 176),
    14: ("Q6_K", 210),
    16: ("IQ2_XXS", 66),
    17: ("IQ2_XS", 74),
    18: ("IQ3_XXS", 98),
    19: ("IQ1_S", 50),
    20: ("IQ4_NL", 18),
    21: ("IQ3_S", 110),
    22: ("IQ2_S", 82),
    23: ("IQ4_XS", 136),
    29: ("IQ1_M", 56),
    34: ("TQ1_0", 54),
    35: ("TQ2_0", 66),
    39: ("MXFP4", 17),
    40: ("NVFP4", 36),
    41: ("Q1_0", 18),
    42: ("Q2_0", 18),
}
_FLOATS = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}
TYPES: dict[int, BlockType] = {
    **{number: BlockType(name=name, size=1, nbytes=nbytes, dtype=name) for number, (name, nbytes) in _FLOATS.items()},
    **{
        number: BlockType(name=name, size=size, nbytes=nbytes, packing=packings[name])
        for number, (name, nbytes) in _NUMBERS.items()
        for size, packings in _BY_SIZE.items()
        if name in packings
    },
}
# What is not read: number → name
_OTHERS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}


def block_type(number: int, where: str) -> BlockType:
    """By its number in the file. Raises UnsupportedModelError."""
    if number not in TYPES:
        raise UnsupportedModelError(
            "GGUF tensors of this type are not supported",
            where=where,
            expected=", ".join(each.name for each in TYPES.values()),
            got=_OTHERS.get(number, f"type {number}"),
            hint="take another version of the model, such as Q4_K_M or Q8_0",
        )
    return TYPES[number]
