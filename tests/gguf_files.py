"""Writes GGUF files, and decodes blocks one number at a time, after the format's description."""

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Stored = tuple[int, tuple[int, ...], bytes]
"""(type, shape as numpy has it, bytes)"""

IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
F32, F16, BF16 = 0, 1, 30


class U64(int):
    """A setting of that type; other integers are u32, or i32 where they are negative."""


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def setting(value: object) -> tuple[int, bytes]:
    """(type, bytes)"""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, U64):
        return 10, struct.pack("<Q", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, (str, bytes)):
        return 8, text(value)
    assert isinstance(value, list), f"{value!r} is no setting"
    items = [setting(each) for each in value]
    return 9, struct.pack("<IQ", items[0][0] if items else 4, len(items)) + b"".join(data for _, data in items)


def write_gguf(
    path: Path,
    settings: Mapping[str, object],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
    offsets: Callable[[list[int]], list[int]] = lambda places: places,
) -> Path:
    """counts, offsets: what the header says instead of the truth."""
    places, position = [], 0
    for _, _, data in tensors.values():
        places.append(position)
        position += -(-len(data) // alignment) * alignment
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(settings))))
    for key, value in settings.items():
        kind, data = setting(value)
        head += text(key) + struct.pack("<I", kind) + data
    for (name, (kind, shape, _)), place in zip(tensors.items(), offsets(places), strict=True):
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, place)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % alignment))
        for _, _, data in tensors.values():
            file.write(data)
            file.write(bytes(-len(data) % alignment))
    return path


def floats(values: Array, kind: int = F32) -> Stored:
    """A tensor of float32, float16 or bf16; of bf16 the values must fit."""
    values = np.ascontiguousarray(values, np.float32)
    if kind == BF16:
        return kind, values.shape, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return kind, values.shape, values.astype(np.float16 if kind == F16 else np.float32).tobytes()


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def six_bits(block: bytes, group: int) -> tuple[int, int]:
    """Scale and minimum of a group of Q4_K and Q5_K."""
    b = block[4:16]
    if group < 4:
        return b[group] & 63, b[group + 4] & 63
    return b[group + 4] & 15 | b[group - 4] >> 6 << 4, b[group + 4] >> 4 | b[group] >> 6 << 4


def nibble(block: bytes, at: int, i: int) -> int:
    """Element i of 32: the first 16 in the low halves of 16 bytes."""
    return block[at + i] & 15 if i < 16 else block[at + i - 16] >> 4


def fifth(block: bytes, at: int, i: int) -> int:
    return (int.from_bytes(block[at : at + 4], "little") >> i & 1) << 4


def wide(block: bytes, at: int, i: int) -> int:
    """Element i of 256: in turns of 32 bytes, 32 low and 32 high halves."""
    byte = block[at + i // 64 * 32 + i % 32]
    return byte >> 4 if i % 64 >= 32 else byte & 15


def q2(block: bytes, at: int, i: int) -> int:
    return block[at + i // 128 * 32 + i % 32] >> i % 128 // 32 * 2 & 3


def q2_k(b: bytes, i: int) -> float:
    scale = b[i // 16]
    return half(b, 80) * (scale & 15) * q2(b, 16, i) - half(b, 82) * (scale >> 4)


def q3_k(b: bytes, i: int) -> float:
    j = i // 16
    low = b[96 + j % 8] >> 4 * (j // 8) & 15
    scale = (low | (b[104 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32
    return half(b, 108) * scale * (q2(b, 32, i) - (0 if b[i % 32] >> i // 32 & 1 else 4))


def q45_k(b: bytes, i: int, five: bool) -> float:
    scale, least = six_bits(b, i // 32)
    code = wide(b, 48, i) | (b[16 + i % 32] >> i // 32 & 1) << 4 if five else wide(b, 16, i)
    return half(b, 0) * scale * code - half(b, 2) * least


def q6_k(b: bytes, i: int) -> float:
    part, inner = i // 128, i % 128
    low = b[part * 64 + inner % 64] >> 4 * (inner // 64) & 15
    high = b[128 + part * 32 + inner % 32] >> 2 * (inner // 32) & 3
    scale = int(np.frombuffer(b[192:208], np.int8)[i // 16])
    return half(b, 208) * scale * ((low | high << 4) - 32)


def iq4_xs(b: bytes, i: int) -> float:
    j = i // 32
    scale = (b[4 + j // 2] >> 4 * (j % 2) & 15 | (int.from_bytes(b[2:4], "little") >> 2 * j & 3) << 4) - 32
    return half(b, 0) * scale * IQ4[nibble(b, 8 + 16 * j, i % 32)]


def tq1(b: bytes, i: int) -> float:
    """Digits of fractions in base 3: five of each of 32 bytes, of 16 bytes, and four of the last four."""
    byte, digit = (
        (i % 32, i // 32) if i < 160 else (32 + i % 16, (i - 160) // 16) if i < 240 else (48 + i % 4, (i - 240) // 4)
    )
    return half(b, 52) * float((b[byte] * 3**digit % 256 * 3 >> 8) - 1)


def nvfp4(b: bytes, i: int) -> float:
    part, inner = divmod(i, 16)
    exponent, fraction = b[part] >> 3 & 15, b[part] & 7
    scale = fraction / 512 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    byte = b[4 + part * 8 + inner % 8]
    return scale * E2M1[byte >> 4 if inner > 7 else byte & 15]


@functools.cache
def read_by_gguf(kind: int, block: bytes) -> Array:
    """The numbers of a block as the package `gguf` reads them."""
    raw = np.frombuffer(block, np.uint8)[None]
    return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))).reshape(-1)


def from_gguf(kind: int) -> "Decoder":
    return lambda b, i: float(read_by_gguf(kind, b)[i])


Decoder = Callable[[bytes, int], float]
# number → (name, elements of a block, bytes, float16 at these places, value of element i)
BLOCKS: dict[int, tuple[str, int, int, tuple[int, ...], Decoder]] = {
    2: ("Q4_0", 32, 18, (0,), lambda b, i: half(b, 0) * (nibble(b, 2, i) - 8)),
    3: ("Q4_1", 32, 20, (0, 2), lambda b, i: half(b, 0) * nibble(b, 4, i) + half(b, 2)),
    6: ("Q5_0", 32, 22, (0,), lambda b, i: half(b, 0) * ((nibble(b, 6, i) | fifth(b, 2, i)) - 16)),
    7: ("Q5_1", 32, 24, (0, 2), lambda b, i: half(b, 0) * (nibble(b, 8, i) | fifth(b, 4, i)) + half(b, 2)),
    8: ("Q8_0", 32, 34, (0,), lambda b, i: half(b, 0) * (b[2 + i] - 256 * (b[2 + i] > 127))),
    10: ("Q2_K", 256, 84, (80, 82), q2_k),
    11: ("Q3_K", 256, 110, (108,), q3_k),
    12: ("Q4_K", 256, 144, (0, 2), lambda b, i: q45_k(b, i, five=False)),
    13: ("Q5_K", 256, 176, (0, 2), lambda b, i: q45_k(b, i, five=True)),
    14: ("Q6_K", 256, 210, (208,), q6_k),
    16: ("IQ2_XXS", 256, 66, (0,), from_gguf(16)),
    17: ("IQ2_XS", 256, 74, (0,), from_gguf(17)),
    18: ("IQ3_XXS", 256, 98, (0,), from_gguf(18)),
    19: ("IQ1_S", 256, 50, (0,), from_gguf(19)),
    20: ("IQ4_NL", 32, 18, (0,), lambda b, i: half(b, 0) * IQ4[nibble(b, 2, i)]),
    21: ("IQ3_S", 256, 110, (0,), from_gguf(21)),
    22: ("IQ2_S", 256, 82, (0,), from_gguf(22)),
    23: ("IQ4_XS", 256, 136, (0,), iq4_xs),
    29: ("IQ1_M", 256, 56, (), from_gguf(29)),
    34: ("TQ1_0", 256, 54, (52,), tq1),
    35: ("TQ2_0", 256, 66, (64,), lambda b, i: half(b, 64) * (q2(b, 0, i) - 1)),
    39: ("MXFP4", 32, 17, (), lambda b, i: E2M1[nibble(b, 1, i)] * 2.0 ** (b[0] - 127)),
    40: ("NVFP4", 64, 36, (), nvfp4),
    41: ("Q1_0", 128, 18, (0,), lambda b, i: half(b, 0) * (2 * (b[2 + i // 8] >> i % 8 & 1) - 1)),
    42: ("Q2_0", 64, 18, (0,), lambda b, i: half(b, 0) * ((b[2 + i // 4] >> 2 * (i % 4) & 3) - 1)),
}


def random_blocks(rng: np.random.Generator, kind: int, shape: tuple[int, ...]) -> tuple[Stored, Array]:
    """A tensor of random bits whose scales are small numbers, and its values, rounded once."""
    name, size, nbytes, halves, decode = BLOCKS[kind]
    count = int(np.prod(shape)) // size
    raw = rng.integers(0, 256, (count, nbytes)).astype(np.uint8)
    scale = np.float16(0.002) if size == 256 else np.float16(0.02)
    for at in halves:
        raw[:, at : at + 2] = (scale * rng.uniform(0.5, 1.5, (count, 1))).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        raw[:, 0] = rng.integers(117, 123, count)
    if name == "NVFP4":
        raw[:, :4] = rng.integers(0, 24, (count, 4))
    if name == "IQ1_M":  # the highest nibbles of four words are d
        bits = int((scale * np.float16(1)).view(np.uint16))
        for word in range(4):
            raw[:, 49 + 2 * word] = raw[:, 49 + 2 * word] & 15 | (bits >> 4 * word & 15) << 4
    values = [decode(block.tobytes(), i) for block in raw for i in range(size)]
    return (kind, shape, raw.tobytes()), np.array(values).astype(np.float32).reshape(shape)


def q4_k(halves: Array, scales: Array, minima: Array, codes: Array) -> bytes:
    """Blocks of Q4_K: float16 [blocks, 2] of scales and of minima, whole numbers [blocks, 8] that they multiply, codes
    [blocks, 8, 32]."""
    low, high = np.stack([scales, minima])[..., :4], np.stack([scales, minima])[..., 4:]
    first = low | high >> 4 << 6
    numbers = np.concatenate([*first, high[0] & 15 | (high[1] & 15) << 4], axis=1)
    nibbles = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = halves.astype(np.float16).view(np.uint8), numbers, nibbles.reshape(-1, 128)
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=1).tobytes()


def byte_tokens(words: Sequence[str] = ()) -> dict[str, object]:
    """Settings of a sentencepiece tokenizer of all bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
