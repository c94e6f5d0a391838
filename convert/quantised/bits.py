"""How packed integers lie in words and bytes: dense streams of fields, pairs of nibbles, exponents."""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.generic]


def fields(words: Words, bits: int) -> Bytes:
    """Words [..., w] → their fields of `bits` bits [..., n], one dense stream, least significant bits first."""
    stream = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stream
    if bits == 4:
        return nibbles(stream)
    count = stream.shape[-1] * 8 // bits
    spread = np.unpackbits(stream, axis=-1, bitorder="little")[..., : count * bits]
    packed: Bytes = np.packbits(spread.reshape(*stream.shape[:-1], count, bits), axis=-1, bitorder="little")
    return packed[..., 0]


def fields_per_word(words: npt.NDArray[np.int32], bits: int) -> Bytes:
    """As `fields`, of words that hold whole fields only: a rest of their highest bits is empty."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    found = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return found.astype(np.uint8).reshape(*words.shape[:-1], -1)


def nibbles(stream: Bytes) -> Bytes:
    """Bytes [..., n] → nibbles [..., 2n], the low one first."""
    return np.stack([stream & 15, stream >> 4], axis=-1).reshape(*stream.shape[:-1], -1)


def pack_nibbles(codes: Bytes) -> Bytes:
    """Inverse of `nibbles`; of signed codes the low four bits."""
    return (codes[..., 0::2] & np.uint8(15)) | (codes[..., 1::2] << np.uint8(4))


def signed_bytes(codes: Bytes) -> Bytes:
    """Two's complement of 4 bits → of 8."""
    return (codes ^ np.uint8(8)) - np.uint8(8)


def exponents_as_bf16(stored: Bytes) -> npt.NDArray[np.uint16]:
    """E8M0, 2^(e - 127), as bf16: the exponent alone, 2^-127 as a subnormal. 255 (NaN) becomes an infinity."""
    found: npt.NDArray[np.uint16] = np.where(stored == 0, 0x40, stored.astype(np.uint16) << 7).astype(np.uint16)
    return found
