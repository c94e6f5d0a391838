"""GGUF types of codebooks, of one or two bits, and NVFP4: how blocks say their codes and scales.

    w = table[q] * scale            16 or 32 neighbours share a scale; of types of one or two bits, a block does

IQ1, IQ2 and IQ3 store four or eight neighbours as a row of a codebook and their signs. Both become one code of four
bits, and the table has the value of each. Scales are odd numbers times d, a float16.
"""

import numpy as np

from ingot.convert.gguf.codebooks import codebook
from ingot.convert.gguf.packing import Array, Packing, Raw, Take, planes, stored_half
from ingot.convert.quantised.form import Code
from ingot.convert.quantised.formats.fp4 import E2M1
from ingot.dtypes import DType

_SIGN = np.uint8(8)  # of a code
# Seven signs as they are stored, and the eighth, which makes the number of minus signs even.
_SIGNS = np.array([seven | (seven.bit_count() & 1) << 7 for seven in range(128)], np.uint8)


def _with_signs(*sizes: float) -> tuple[float, ...]:
    """Values of codes, of which the highest bit is the sign."""
    positive = (*sizes, *[0.0] * (8 - len(sizes)))
    return (*positive, *(-value for value in positive))


# A codebook's digits as multiples of what its scales count; both as ggml has them, but for a factor between the two.
_IQ2 = _with_signs(1, 3.125, 5.375)
_IQ3_XXS = _with_signs(1, 3, 5, 7, 9, 11, 13, 15.5)
_IQ3_S = _with_signs(1, 3, 5, 7, 9, 11, 13, 15)
_IQ1 = (-0.875, 0.125, 1.125, *[0.0] * 5, -1.125, -0.125, 0.875, *[0.0] * 5)  # a digit - 1, and 1/8 more or less


def _words(raw: Raw, begin: int, end: int, dtype: type[np.generic]) -> Array:
    """Bytes [begin, end) of each block as integers [B, n]."""
    return np.ascontiguousarray(raw[:, begin:end]).view(np.dtype(dtype).newbyteorder("<"))


def _codes(name: str, index: Array, minus: Array) -> Array:
    """index: rows of the codebook, [B, rows]. minus: [B, elements], 1 where the sign is minus."""
    found = codebook(name)[index].reshape(len(index), -1)
    return found | minus.astype(np.uint8) * _SIGN


def _bits(stream: Raw) -> Array:
    return planes(stream, 1, 1)


def _seven_signs(words: Array) -> Array:
    """u32 [B, n] → signs of 32 elements each: four times seven bits, the lowest ones first."""
    fields = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return _bits(_SIGNS[fields].reshape(len(words), -1))


def _odd(numbers: Array) -> Array:
    return (2 * numbers + 1).astype(np.int8)


def _iq2_xxs(raw: Raw) -> Array:
    """For each 32 elements four bytes of indices, and a u32 of signs with the scale on top."""
    index = raw[:, 2:66].reshape(len(raw), 8, 8)[:, :, :4].reshape(len(raw), -1)
    return _codes("IQ2_XXS", index, _seven_signs(_words(raw, 2, 66, np.uint32)[:, 1::2]))


def _iq2_xs(raw: Raw) -> Array:
    """u16 of nine bits of index and seven of signs, for each eight elements; 8 B of scales."""
    words = _words(raw, 2, 66, np.uint16)
    return _codes("IQ2_XS", words & np.uint16(511), _bits(_SIGNS[words >> np.uint16(9)]))


def _iq2_s(raw: Raw) -> Array:
    """32 B of indices, 32 B of signs, 8 B of two upper bits of indices, 8 B of scales."""
    index = raw[:, 2:34].astype(np.uint16) | planes(raw[:, 66:74], 1, 2).astype(np.uint16) << np.uint16(8)
    return _codes("IQ2_S", index, _bits(raw[:, 34:66]))


def _iq3_xxs(raw: Raw) -> Array:
    """64 B of indices; u32 of signs with the scale on top, for each 32 elements."""
    return _codes("IQ3_XXS", raw[:, 2:66], _seven_signs(_words(raw, 66, 98, np.uint32)))


def _iq3_s(raw: Raw) -> Array:
    """64 B of indices, 8 B of their ninth bits, 32 B of signs, 4 B of scales."""
    index = raw[:, 2:66].astype(np.uint16) | _bits(raw[:, 66:74]).astype(np.uint16) << np.uint16(8)
    return _codes("IQ3_S", index, _bits(raw[:, 74:106]))


def _iq1_s(raw: Raw) -> Array:
    """32 B of indices; for each 32 elements a u16: three upper bits of each index, three of the scale, a sign."""
    high = _words(raw, 34, 50, np.uint16)
    upper = (high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)).reshape(len(raw), -1)
    index = raw[:, 2:34].astype(np.uint16) | upper << np.uint16(8)
    return _codes("IQ1_S", index, np.repeat(high >> np.uint16(15), 32, axis=1))


def _iq1_m(raw: Raw) -> Array:
    """32 B of indices; 16 B of their upper bits, three each, with a sign on top; 8 B of scales and of d."""
    upper = planes(raw[:, 32:48], 1, 4)
    index = raw[:, :32].astype(np.uint16) | (upper & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    return _codes("IQ1_S", index, np.repeat(upper >> np.uint8(3), 8, axis=1))


def _iq1_m_scale(raw: Raw) -> Array:
    """Four u16, each of four times three bits."""
    words = _words(raw, 48, 56, np.uint16)
    return _odd((words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)).reshape(len(raw), -1))


def _iq1_m_unit(raw: Raw) -> Array:
    """The four u16 have four bits of d each on top, the lowest ones first."""
    top = _words(raw, 48, 56, np.uint16) >> np.uint16(12)
    return np.bitwise_or.reduce(top << np.arange(0, 16, 4, dtype=np.uint16), axis=1, keepdims=True).view(np.float16)


def _top_scale(begin: int, step: int) -> Take:
    """Four bits on top of every so many u32, from a byte on."""
    return lambda raw: _odd(_words(raw, begin, raw.shape[1], np.uint32)[:, step - 1 :: step] >> np.uint32(28))


def _nibble_scale(begin: int) -> Take:
    """A nibble each, the low ones first, from a byte to the end of the block."""
    return lambda raw: _odd(planes(raw[:, begin:], 1, 4))


def _in_codebook(group: int, codes: Take, scale: Take, table: tuple[float, ...], unit: Take) -> Packing:
    return Packing(
        code=Code.U4, group=group, codes=codes, scale=scale, scale_dtype=DType.I8, scale_unit=unit, table=table
    )


def _trits(stream: Raw, count: int) -> Array:
    """Bytes [B, n] → digits 0 to 2, [B, count * n]: the first ones of all bytes, the second ones .. A byte is a
    fraction in base 3, over 256."""
    left = stream[:, None, :] * (3 ** np.arange(count)).astype(np.uint8)[:, None]  # modulo 256
    digits = left.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
    return digits.astype(np.uint8).reshape(len(stream), -1)


def _tq1(raw: Raw) -> Array:
    """32 B and 16 B of five digits each, 4 B of four."""
    digits = [_trits(raw[:, :32], 5), _trits(raw[:, 32:48], 5), _trits(raw[:, 48:52], 4)]
    return np.concatenate(digits, axis=1)


def _small(group: int, codes: Take, at: int, *values: float) -> Packing:
    """values: of the codes. The table says that these have two bits."""
    table = (*values, *[0.0] * (16 - len(values)))
    return Packing(code=Code.U4, group=group, codes=codes, scale=stored_half(at), scale_dtype=DType.F16, table=table)


def _unsigned_e4m3(raw: Raw) -> Array:
    """4 B; 127, which is NaN, counts as 0, and the sign as nothing."""
    stored = raw[:, :4]
    exponent, fraction = (stored >> 3 & 15).astype(np.int32), (stored & 7).astype(np.float32)
    value = np.where(exponent == 0, fraction / 512, np.ldexp(1 + fraction / 8, exponent - 7))
    return np.where(stored == 127, 0, value).astype(np.float16)


# Types of blocks of 256, of 128 and of 64. What begins a block is d, where nothing else is said.
BY_256: dict[str, Packing] = {
    "IQ2_XXS": _in_codebook(32, _iq2_xxs, _top_scale(2, 2), _IQ2, stored_half(0)),
    "IQ2_XS": _in_codebook(16, _iq2_xs, _nibble_scale(66), _IQ2, stored_half(0)),
    "IQ2_S": _in_codebook(16, _iq2_s, _nibble_scale(74), _IQ2, stored_half(0)),
    "IQ3_XXS": _in_codebook(32, _iq3_xxs, _top_scale(66, 1), _IQ3_XXS, stored_half(0)),
    "IQ3_S": _in_codebook(32, _iq3_s, _nibble_scale(106), _IQ3_S, stored_half(0)),
    "IQ1_S": _in_codebook(
        32,
        _iq1_s,
        lambda raw: _odd(_words(raw, 34, 50, np.uint16) >> np.uint16(12) & np.uint16(7)),
        _IQ1,
        stored_half(0),
    ),
    "IQ1_M": _in_codebook(16, _iq1_m, _iq1_m_scale, _IQ1, _iq1_m_unit),
    # 52 B, d
    "TQ1_0": _small(256, _tq1, 52, -1, 0, 1),
    # 64 B of four digits each, d
    "TQ2_0": _small(256, lambda raw: planes(raw[:, :64], 32, 2), 64, -1, 0, 1, 2),
}
BY_128: dict[str, Packing] = {
    # d, 16 B of bits: minus or plus one
    "Q1_0": _small(128, lambda raw: _bits(raw[:, 2:]), 0, -1, 1)
}
BY_64: dict[str, Packing] = {
    # d, 16 B of four codes each
    "Q2_0": _small(64, lambda raw: planes(raw[:, 2:], 1, 2), 0, -1, 0, 1, 2),
    # 4 B of scales, 32 B
    "NVFP4": Packing(
        code=Code.U4,
        group=16,
        codes=lambda raw: planes(raw[:, 4:], 8, 4),
        scale=_unsigned_e4m3,
        scale_dtype=DType.F16,
        table=E2M1,
    ),
}
