"""What a GGUF file says before its weights: settings by key, and where the bits of each tensor lie.

    "GGUF" │ u32 version │ u64 tensors │ u64 settings │ settings │ tensor infos │ padding │ data
    setting: text key, u32 type, value            tensor info: text name, u32 ndim, u64 sizes, u32 type, u64 offset
    text: u64 bytes, UTF-8                         array: u32 type, u64 count, values

Sizes run from the fastest to the slowest dimension; offsets count from the data, which begins at a multiple of
general.alignment. Everything is little endian. Nothing of the file is trusted: counts are compared with the bytes that
are left, and tensors must follow one another without holes.
"""

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from ingot.convert.gguf.blocks import BlockType, block_type
from ingot.errors import CheckpointError, UnsupportedModelError

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER = 64 << 20  # bytes: four times those of the largest vocabularies
_MOST_TEXT = 8 << 20  # bytes of one text: the longest are chat templates
_MOST_KEY = 1 << 16  # bytes
_MOST_NAME = 256  # bytes of a tensor's name; llama.cpp allows 64
_MOST_ITEMS = 1 << 22  # of an array: 16 times the largest vocabularies
_MOST_TENSORS = 1 << 20
_MOST_SETTINGS = 1 << 16
_MOST_DIMS = 4
_MOST_ALIGNMENT = 1 << 20
_ALIGNMENT = 32
_TEXT, _ARRAY = 8, 9
# type → how `struct` spells it
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_AGAIN = "download the file again; if it is complete, it was made by a writer that ingot does not know"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Where the bits of a tensor lie: rows of blocks.

    shape   as Hugging Face counts, the slowest dimension first
    offset  of the first byte, counted from the begin of the file
    """

    name: str
    file: Path
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.size * self.type.nbytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """settings: key → value. tensors: name → where it lies."""

    path: Path
    settings: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> Header:
    """Raises CheckpointError for a file that is not sound, UnsupportedModelError for a type that is not read."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file, path.stat().st_size).header()
    except OSError as error:
        raise CheckpointError("the GGUF file cannot be read", where=str(path), got=error.strerror) from error


class _Reader:
    """Reads from the front, never more bytes than the file has, nor than a header may have."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size, self._at = path, file, size, 0

    def header(self) -> Header:
        """The whole of it."""
        self._require_magic()
        tensors = self._count("tensors", _MOST_TENSORS, 24)
        settings = self._count("settings", _MOST_SETTINGS, 13)
        values: dict[str, Value] = {}
        for _ in range(settings):
            key = self._text("a key", _MOST_KEY)
            if key in values:
                raise self._broken("a setting is there twice", key)
            values[key] = self._value(key, self._number("I"))
        found: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for _ in range(tensors):
            name = self._text("the name of a tensor", _MOST_NAME)
            if name in found:
                raise self._broken("a tensor is there twice", name)
            found[name] = self._info(name)
        alignment = self._alignment(values)
        data = -(-self._at // alignment) * alignment
        places = {name: data + offset for name, (_, _, offset) in found.items()}
        made = {
            name: GgufTensor(name=name, file=self._path, type=kind, shape=shape, offset=places[name])
            for name, (kind, shape, _) in found.items()
        }
        self._check_cover(made, data, alignment)
        return Header(path=self._path, settings=values, tensors=made)

    def _require_magic(self) -> None:
        """Raise for what is not a GGUF file of a version that is read."""
        magic = self._bytes(4)
        if magic != _MAGIC:
            raise CheckpointError(
                "the file is not a GGUF file",
                where=str(self._path),
                expected=repr(_MAGIC),
                got=repr(magic),
                hint=_AGAIN,
            )
        version = self._number("I")
        if version in _VERSIONS:
            return
        swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
        raise UnsupportedModelError(
            "GGUF files of big-endian machines are not supported"
            if swapped in _VERSIONS
            else "GGUF files of this version are not supported",
            where=f"{self._path}: version",
            expected=" or ".join(map(str, _VERSIONS)),
            got=str(swapped if swapped in _VERSIONS else version),
            hint="make the file again with a current llama.cpp, for little-endian machines",
        )

    def _info(self, name: str) -> tuple[BlockType, tuple[int, ...], int]:
        """(type, shape, offset from the data)"""
        ndim = self._number("I")
        if not 1 <= ndim <= _MOST_DIMS:
            raise self._broken("a tensor has too many or no dimensions", name, f"1 to {_MOST_DIMS}", str(ndim))
        shape = tuple(int(self._number("Q")) for _ in range(int(ndim)))[::-1]
        kind = block_type(int(self._number("I")), f"{self._path}: {name}")
        if 0 in shape or math.prod(shape) >= 1 << 62:
            raise self._broken("a tensor has a wrong size", name, "at least 1 in every dimension", str(shape))
        if shape[-1] % kind.size:
            raise self._broken(
                "the rows of a tensor are not whole blocks", name, f"a multiple of {kind.size}", str(shape[-1])
            )
        return kind, shape, int(self._number("Q"))

    def _alignment(self, settings: Mapping[str, Value]) -> int:
        found = settings.get("general.alignment", _ALIGNMENT)
        alignment = found if isinstance(found, int) else 0
        if not 1 < alignment <= _MOST_ALIGNMENT or alignment & alignment - 1:
            raise self._broken(
                "general.alignment has a wrong value", "general.alignment", "a power of two", repr(found)[:100]
            )
        return alignment

    def _check_cover(self, tensors: Mapping[str, GgufTensor], data: int, alignment: int) -> None:
        """The tensors, by offset, must fill [data, size) but for padding."""
        position = data
        for tensor in sorted(tensors.values(), key=lambda each: (each.offset, each.nbytes)):
            end = tensor.offset + tensor.nbytes
            if end > self._size:
                raise self._broken(
                    "truncated: a tensor lies beyond the end of the file",
                    tensor.name,
                    f"{end:,} bytes",
                    f"{self._size:,} bytes",
                )
            if tensor.offset != position:
                kind = "overlaps the one before it" if tensor.offset < position else "leaves a hole before it"
                raise self._broken(f"a tensor {kind}", tensor.name, f"byte {position:,}", f"byte {tensor.offset:,}")
            position = -(-end // alignment) * alignment
        if self._size > max(position, data):
            raise self._broken(
                "bytes after the last tensor belong to no tensor", "", f"{position:,} bytes", f"{self._size:,} bytes"
            )

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        """A number of things, each of at least so many bytes."""
        count = int(self._number("Q"))
        if count > min(most, (self._size - self._at) // least_bytes):
            raise self._broken(
                f"the file is too small for this many {what}",
                "",
                f"at most {min(most, self._size // least_bytes):,}",
                f"{count:,}",
            )
        return count

    def _value(self, key: str, kind: int | float) -> Value:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[int(kind)])
        if kind == _TEXT:
            return self._text(key, _MOST_TEXT)
        if kind != _ARRAY:
            raise self._broken("a setting has an unknown type", key, "0 to 12", str(kind))
        item = int(self._number("I"))
        if item not in _NUMBERS and item != _TEXT:
            raise self._broken("an array holds items of an unknown type", key, "numbers or texts", str(item))
        count = self._count(f"items of {key}", _MOST_ITEMS, 8 if item == _TEXT else struct.calcsize(_NUMBERS[item]))
        if item == _TEXT:
            return [self._text(key, _MOST_TEXT) for _ in range(count)]
        form = f"<{count}{_NUMBERS[item]}"
        return list(struct.unpack(form, self._bytes(struct.calcsize(form))))

    def _number(self, form: str) -> int | float:
        found: int | float = struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]
        return found

    def _text(self, what: str, most: int) -> str:
        length = int(self._number("Q"))
        if length > most:
            raise self._broken("a text is too long", what, f"at most {most:,} bytes", f"{length:,}")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken("a text is not UTF-8", what, "UTF-8", str(error)) from error

    def _bytes(self, count: int) -> bytes:
        if self._at + count > _MOST_HEADER:
            raise self._broken("the header is too large", "", f"at most {_MOST_HEADER:,} bytes", "more")
        found = self._file.read(count)
        self._at += len(found)
        if len(found) < count:
            raise self._broken(
                "the file ends within its header",
                "",
                f"{self._at + count - len(found):,} bytes",
                f"{self._size:,} bytes",
            )
        return found

    def _broken(self, what: str, name: str, expected: str | None = None, got: str | None = None) -> CheckpointError:
        return CheckpointError(
            f"the GGUF file is damaged: {what}",
            where=f"{self._path}: {name}" if name else str(self._path),
            expected=expected,
            got=got,
            hint=_AGAIN,
        )
