"""Writes a GGUF file: settings, then tensors one after the other (`convert/gguf/header.py` has the layout)."""

import dataclasses
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.convert.gguf.blocks import TYPES

ALIGNMENT = 32
_VERSION = 3
_U32, _I32, _F32, _BOOL, _TEXT, _ARRAY = 4, 5, 6, 7, 8, 9

Setting = int | float | bool | str | Sequence[int] | Sequence[float] | Sequence[str]
_NUMBERS = {each.name: number for number, each in TYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTensor:
    """kind: name of its type. shape: slowest dimension first. read: its bytes, block by block."""

    name: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], Iterator[npt.NDArray[np.generic]]]

    @property
    def nbytes(self) -> int:
        of = TYPES[_NUMBERS[self.kind]]
        return math.prod(self.shape) // of.size * of.nbytes


def write_gguf(
    path: Path,
    settings: Mapping[str, Setting],
    tensors: Sequence[FileTensor],
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a new file; numbers are u32 (in arrays i32) and float32."""
    head = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(settings))]
    head += [_text(key) + struct.pack("<I", _kind(value)) + _value(value) for key, value in settings.items()]
    place = 0
    for each in tensors:
        sizes = each.shape[::-1]
        head.append(_text(each.name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes))
        head.append(struct.pack("<IQ", _NUMBERS[each.kind], place))
        place += -(-each.nbytes // ALIGNMENT) * ALIGNMENT
    whole = b"".join(head)
    with path.open("wb") as file:
        file.write(whole + bytes(-len(whole) % ALIGNMENT))
        for each in tensors:
            written = 0
            for block in each.read():
                data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
                file.write(data)
                written += len(data)
                advance(len(data))
            assert written == each.nbytes, f"{each.name}: wrote {written} bytes, its header promises {each.nbytes}"
            file.write(bytes(-written % ALIGNMENT))


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _kind(value: Setting) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, str):
        return _TEXT
    return _U32 if isinstance(value, int) else _F32 if isinstance(value, float) else _ARRAY


def _value(value: Setting) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<?", value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return struct.pack("<I", value)
    if isinstance(value, float):
        return struct.pack("<f", value)
    kind = _kind(value[0]) if value else _U32
    kind = _I32 if kind == _U32 else kind  # llama.cpp takes types of tokens in no other form
    return struct.pack("<IQ", kind, len(value)) + b"".join(_value(each) for each in value)
