"""Checksums of files by chunks: made while a file is written, checked while ranges of it are read.

    bytes      0          4 MiB        8 MiB    end
               ├────────────┼────────────┼───────┤
    crc32         1a2b3c4d     5e6f7081    92a3b4c5      one for each started chunk

A reader checks a chunk whole, the first time that a range touches it, before it gives out a byte of it. What nobody
reads is not checked.
"""

import dataclasses
import os
import threading
import zlib
from pathlib import Path
from typing import Annotated

from ingot.configs.exact import Bytes, Like
from ingot.errors import CheckpointError

CHUNK_BYTES = 4 << 20
_DIGITS = 8

Crc32Digits = Annotated[str, Like(f"([0-9a-f]{{{_DIGITS}}})*", f"{_DIGITS} hexadecimal digits for each chunk")]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Checksums:
    """The checksums of a file.

    crc32  a checksum per started chunk of CHUNK_BYTES, zlib's polynomial, one after the other
    """

    nbytes: Bytes
    crc32: Crc32Digits

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.nbytes // CHUNK_BYTES)

    def crc32_of(self, chunk: int) -> int:
        """The checksum that a chunk must have."""
        return int(self.crc32[_DIGITS * chunk : _DIGITS * (chunk + 1)], 16)

    def problem(self) -> str | None:
        """What is wrong where there is not a checksum for each chunk, and no other; None where all is well."""
        if len(self.crc32) == self.chunks * _DIGITS:
            return None
        return f"{len(self.crc32) // _DIGITS} checksums for the {self.chunks} chunks of {self.nbytes} bytes"


class Summer:
    """Takes the bytes of a file from front to back."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._digits, self._crc = list[str](), 0

    def update(self, data: memoryview) -> None:
        """The next bytes (a view of single bytes)."""
        while len(data):
            room = CHUNK_BYTES - self.nbytes % CHUNK_BYTES
            self._crc = zlib.crc32(data[:room], self._crc)
            self.nbytes += min(room, len(data))
            data = data[room:]
            if self.nbytes % CHUNK_BYTES == 0:
                self._end_chunk()

    def finish(self) -> Checksums:
        """The checksums of all bytes that were taken."""
        if self.nbytes % CHUNK_BYTES:
            self._end_chunk()
        return Checksums(nbytes=self.nbytes, crc32="".join(self._digits))

    def _end_chunk(self) -> None:
        self._digits.append(f"{self._crc:08x}")
        self._crc = 0


class CheckedFile:
    """Ranges of a file of a Checkpoint, from several threads; memory stays at the range and one chunk."""

    def __init__(self, path: Path, sums: Checksums) -> None:
        self._path, self._sums = path, sums
        self._sound: set[int] = set()  # chunks whose checksum was right
        self._file = os.open(path, os.O_RDONLY)
        self._checking = threading.Lock()

    def close(self) -> None:
        """Nothing can be read any more."""
        os.close(self._file)

    def read(self, offset: int, count: int) -> bytes:
        """Bytes [offset, offset + count). Raises CheckpointError where the file is shorter or damaged."""
        pieces, end = [], offset + count
        while offset < end:
            chunk = offset // CHUNK_BYTES
            stop = min(end, (chunk + 1) * CHUNK_BYTES)
            pieces.append(self._within(chunk, offset, stop))
            offset = stop
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _within(self, chunk: int, begin: int, end: int) -> bytes:
        """A range of one chunk."""
        if chunk in self._sound:
            return self._pread(begin, end)
        first, last = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self._sums.nbytes)
        data = self._pread(first, max(last, end))
        if zlib.crc32(data) != self._sums.crc32_of(chunk):
            raise CheckpointError(
                "a weight file of the Checkpoint is damaged: its checksum does not match",
                where=str(self._path),
                expected=f"crc32 {self._sums.crc32_of(chunk):08x} of bytes {first} to {last}",
                hint="copy the Checkpoint again, or convert the model again",
            )
        with self._checking:
            self._sound.add(chunk)
        return data[begin - first : end - first]

    def _pread(self, begin: int, end: int) -> bytes:
        data = os.pread(self._file, end - begin, begin)
        while len(data) < end - begin:
            more = os.pread(self._file, end - begin - len(data), begin + len(data))
            if not more:
                raise CheckpointError(
                    "a weight file of the Checkpoint is truncated",
                    where=str(self._path),
                    expected=f"{end - begin} bytes at {begin}",
                    got=f"{len(data)} bytes",
                    hint="copy the Checkpoint again, or convert the model again",
                )
            data += more
        return data
