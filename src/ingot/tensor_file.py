"""safetensors files: header validation, reading and writing, one block of bytes at a time.

    ┌────────┬──────────────────────────────────┬─────────────┬─────────────┬───┐
    │ u64 n  │ header: JSON, n bytes            │ tensor bits │ tensor bits │...│
    └────────┴──────────────────────────────────┴─────────────┴─────────────┴───┘
               name → dtype, shape, [begin, end) counted from the end of the header

The bytes of the tensors cover the rest of the file exactly: no holes, no overlaps. Offsets may be unaligned.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from ingot.chunks import Checksums, Summer
from ingot.configs.read import MAX_JSON, parse_json
from ingot.dtypes import DType
from ingot.errors import CheckpointError

_ALIGN = 64  # where our files begin their tensor bits
_MOST_DIMS = 32  # as numpy before 2

# Bits per element of what the format can hold; ingot reads a tensor only if DType knows its type too.
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class Change(Protocol):
    """(stored bits of elements in C order, the number of the first) → other bits in their place. memory: bytes that it
    holds meanwhile, beyond a few blocks."""

    @property
    def memory(self) -> int: ...

    def __call__(self, bits: npt.NDArray[np.generic], begin: int, /) -> npt.NDArray[np.generic]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where the bits of a tensor lie.

    dtype_name  as the file says, e.g. "BF16"
    offset      of the first byte, counted from the begin of the file
    change      what reading makes of elements; of a weight that an adapter changes
    """

    name: str
    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    change: Change | None = None

    @property
    def dtype(self) -> DType:
        """Raises CheckpointError for a type that ingot cannot compute with."""
        found = DType.from_safetensors(self.dtype_name)
        if found is None:
            raise CheckpointError(
                f"tensors of type {self.dtype_name} are not supported",
                where=f"{self.file}: {self.name}",
                expected="F32, F16 or BF16",
                hint="save the model in one of these types first",
            )
        return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file in the order of their bits. Raises CheckpointError if the file is not sound."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if MAX_JSON < length <= size - 8:
                raise CheckpointError(
                    "the header of the safetensors file is too large",
                    where=str(path),
                    expected=f"at most {MAX_JSON:,} bytes",
                    got=f"{length:,} bytes",
                    hint="save the model in several files",
                )
            if size < 8 or length > size - 8:
                raise _broken(
                    path, "the file is shorter than its header says", f"{8 + length:,} bytes", f"{size:,} bytes"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError("the safetensors file cannot be read", where=str(path), got=error.strerror) from error
    entries = parse_json(text, f"{path} (header)", CheckpointError)
    if not isinstance(entries, dict):
        raise _broken(path, "the header is not a JSON object", "an object", type(entries).__name__)
    tensors = [_entry(path, name, item, 8 + length) for name, item in entries.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(path, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}


def _entry(path: Path, name: str, item: object, data: int) -> StoredTensor:
    """One line of the header, its numbers checked against each other."""
    where = f"{path}: {name}"
    match item:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            type(number) is int and number >= 0 for number in [*shape, begin, end]
        ):
            pass
        case _:
            raise CheckpointError("a tensor's header entry is malformed", where=where, got=repr(item)[:200])
    if len(shape) > _MOST_DIMS:
        raise CheckpointError(
            "a tensor has too many dimensions", where=where, expected=f"at most {_MOST_DIMS}", got=f"{len(shape):,}"
        )
    bits = _BITS.get(dtype)
    if bits is not None and end - begin != (wanted := math.prod(shape) * bits // 8):
        raise CheckpointError(
            "a tensor's bytes do not fit its shape",
            where=where,
            expected=f"{wanted:,} bytes for {dtype} {shape}",
            got=f"{end - begin:,} bytes at offsets {begin} to {end}",
        )
    if end < begin:
        raise CheckpointError("a tensor ends before it begins", where=where, got=f"offsets {begin} to {end}")
    return StoredTensor(
        name=name, file=path, dtype_name=dtype, shape=tuple(shape), offset=data + begin, nbytes=end - begin
    )


def _check_cover(path: Path, tensors: list[StoredTensor], data: int, size: int) -> None:
    """The tensors, sorted by offset, must fill [data, size) exactly."""
    position = data
    for tensor in tensors:
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise _broken(
                path,
                f"truncated: tensor {tensor.name} lies beyond the end of the file",
                f"{end:,} bytes",
                f"{size:,} bytes",
            )
        if tensor.offset != position:
            kind = "overlaps the one before it" if tensor.offset < position else "leaves a hole before it"
            raise _broken(path, f"tensor {tensor.name} {kind}", f"byte {position:,}", f"byte {tensor.offset:,}")
        position = end
    if position != size:
        raise _broken(path, "bytes after the last tensor belong to no tensor", f"{position:,} bytes", f"{size:,} bytes")


def _broken(path: Path, what: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"the safetensors file is damaged: {what}",
        where=str(path),
        expected=expected,
        got=got,
        hint="copy or download the file again",
    )


def read_elements(tensor: StoredTensor, begin: int, end: int) -> npt.NDArray[np.generic]:
    """Elements [begin, end) in C order, as stored bits, flat; what the tensor's change makes of them. Reads just these
    bytes."""
    dtype = tensor.dtype
    assert 0 <= begin <= end <= math.prod(tensor.shape), f"{begin} to {end} is not inside {tensor.name}"
    try:
        found = np.fromfile(
            tensor.file, dtype.storage, count=end - begin, offset=tensor.offset + begin * dtype.itemsize
        )
    except OSError as error:
        raise CheckpointError(
            "the safetensors file cannot be read", where=str(tensor.file), got=error.strerror
        ) from error
    if len(found) != end - begin:
        raise CheckpointError(
            "the file became shorter while it was read",
            where=f"{tensor.file}: {tensor.name}",
            expected=f"{end - begin:,} elements",
            got=f"{len(found):,}",
        )
    return found if tensor.change is None else tensor.change(found, begin)


def read_rows(tensor: StoredTensor, begin: int = 0, end: int | None = None) -> npt.NDArray[np.generic]:
    """Rows [begin, end) of the first dimension as stored bits, shape [end - begin, ...]; a scalar counts as one row."""
    rows, *rest = tensor.shape or (1,)
    stop = rows if end is None else end
    width = math.prod(rest)
    return read_elements(tensor, begin * width, stop * width).reshape(stop - begin, *rest)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """Writes the tensors of `specs` in their order, a block of bits at a time.

    with TensorFileWriter(path, specs) as file:
        for block in ...: file.write(block)
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        self.path = path
        specs = list(specs)
        ends = list(itertools.accumulate((spec.nbytes for spec in specs), initial=0))
        header: dict[str, object] = {}
        for spec, begin, end in zip(specs, ends, ends[1:], strict=False):
            header[spec.name] = {
                "dtype": spec.dtype.safetensors,
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        assert len(header) == len(specs), f"{path.name}: two tensors share a name"
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        self._head = len(text).to_bytes(8, "little") + text
        self._size = len(self._head) + ends[-1]
        self._file: BinaryIO | None = None
        self._sums = Summer()
        self.tensors = {
            spec.name: StoredTensor(
                name=spec.name,
                file=path,
                dtype_name=spec.dtype.safetensors,
                shape=spec.shape,
                offset=len(self._head) + begin,
                nbytes=spec.nbytes,
            )
            for spec, begin in zip(specs, ends, strict=False)
        }

    def __enter__(self) -> "TensorFileWriter":
        self._file = self.path.open("wb")
        self._put(memoryview(self._head))
        return self

    def write(self, block: npt.NDArray[np.generic]) -> None:
        """Append stored bits."""
        if block.size:
            self._put(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

    def sums(self) -> Checksums:
        """Checksums of the whole file, once everything is written."""
        return self._sums.finish()

    def _put(self, data: memoryview) -> None:
        assert self._file is not None, "write only inside the with block"
        self._file.write(data)
        self._sums.update(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None, "left without being entered"
        self._file.close()
        assert error is not None or self._sums.nbytes == self._size, (
            f"{self.path.name}: wrote {self._sums.nbytes} bytes, its header promises {self._size}"
        )
