"""pytorch_model.bin: where its tensors lie, found without torch and without running what a pickle may ask for.

The file is a zip archive whose members are stored as they are: `NAME/data.pkl` says which tensor is made of which
elements of which storage, `NAME/data/KEY` are the bits of a storage. So a tensor is a range of the file, as in
safetensors. The pickle may use only the Python names that weights need, `_KNOWN`: any other
name ends the reading.
"""

import dataclasses
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from ingot.configs.read import MAX_JSON
from ingot.errors import CheckpointError
from ingot.tensor_file import StoredTensor

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = 30  # bytes of a member's header before its name

HINT = "save the model as safetensors: from_pretrained(...).save_pretrained(...)"

# torch's storage class → (name in safetensors, bytes per element)
_STORAGES = {
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}


@dataclasses.dataclass(frozen=True)
class _StorageType:
    dtype_name: str
    itemsize: int


@dataclasses.dataclass(frozen=True)
class _Storage:
    type: _StorageType
    key: str


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """What the pickle says of a tensor; nothing is checked yet. begin and strides count elements."""

    storage: object
    begin: object
    shape: object
    strides: object


@dataclasses.dataclass(frozen=True)
class _Range:
    """Bytes of the file."""

    offset: int
    nbytes: int


class _Names(dict[object, object]):
    """A dictionary that lets itself be given attributes, as the state of a model is (`_metadata`)."""


def _tensor(*args: object) -> _Tensor:
    """(storage, offset, size, stride, ...): what follows says nothing about the values."""
    if len(args) < 4:
        raise pickle.UnpicklingError("a tensor is described by fewer than four values")
    return _Tensor(*args[:4])


def _parameter(*args: object) -> object:
    return args[0] if args else None


_KNOWN: Mapping[tuple[str, str], object] = {
    ("collections", "OrderedDict"): _Names,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    **{("torch", name): _StorageType(*fields) for name, fields in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Makes dictionaries, texts, numbers and `_Tensor`s, nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which weights do not need")
        return _KNOWN[module, name]

    def persistent_load(self, pid: object) -> object:
        match pid:
            case ("storage", _StorageType() as kind, str(key), *_):
                return _Storage(kind, key)
        raise pickle.UnpicklingError("it refers to something other than a storage")


def read_pickled(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file in the order of their bits. Raises CheckpointError if they are not plainly there."""
    try:
        with path.open("rb") as file:
            if file.read(4) != _ZIP:
                raise _refused(path, "it is not a zip archive, which torch writes since 1.6")
            state, members = _read_archive(file)
            if not isinstance(state, _Names | dict):
                raise _refused(path, f"it holds a {type(state).__name__}, not tensors by name")
            tensors = [_stored(path, name, value, members) for name, value in state.items()]
    except OSError as error:
        raise CheckpointError("the .bin file cannot be read", where=str(path), got=error.strerror) from error
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a made-up pickle may stumble over anything
        raise _refused(path, str(error) or type(error).__name__) from error
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes, tensor.name))
    return {tensor.name: tensor for tensor in tensors}


def _refused(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "the .bin file holds something other than weights",
        where=str(path),
        expected="tensors by name, as torch.save writes a state dict",
        got=got,
        hint=HINT,
    )


def _read_archive(file: BinaryIO) -> tuple[object, dict[str, _Range]]:
    """(what the pickle makes, storage key → its bytes). Raises ValueError and what zipfile and pickle raise."""
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        root = next((name.removesuffix("data.pkl") for name in infos if name.endswith("/data.pkl")), None)
        if root is None:
            raise ValueError("the archive has no data.pkl")
        if f"{root}byteorder" in infos and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("its numbers are not little-endian")
        document = _member(file, infos[f"{root}data.pkl"], size)
        if document.nbytes > MAX_JSON:
            raise ValueError(f"data.pkl has {document.nbytes:,} bytes, more than {MAX_JSON:,}")
        prefix = f"{root}data/"
        members = {
            name.removeprefix(prefix): _member(file, info, size)
            for name, info in infos.items()
            if name.startswith(prefix)
        }
        with archive.open(infos[f"{root}data.pkl"]) as text:
            return _Unpickler(text, encoding="utf-8").load(), members


def _member(file: BinaryIO, info: zipfile.ZipInfo, size: int) -> _Range:
    """Where the bytes of a member lie. Raises ValueError unless they are all there as they are."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise ValueError(f"{info.filename} is compressed")
    file.seek(info.header_offset)
    head = file.read(_LOCAL_HEADER)
    if len(head) < _LOCAL_HEADER or head[:4] != _ZIP:
        raise ValueError(f"{info.filename} does not begin where the archive says")
    name_and_extra = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:], "little")
    begin = info.header_offset + _LOCAL_HEADER + name_and_extra
    if begin + info.file_size > size:
        raise ValueError(f"{info.filename} lies beyond the end of the file")
    return _Range(begin, info.file_size)


def _stored(path: Path, name: object, value: object, members: Mapping[str, _Range]) -> StoredTensor:
    """A tensor of the pickle as a range of the file."""
    where = f"{path}: {name}" if isinstance(name, str) else str(path)
    match value:
        case _Tensor(_Storage(kind, key), int(begin), tuple(shape), tuple(strides)) if (
            isinstance(name, str)
            and len(shape) == len(strides)
            and all(type(number) is int and number >= 0 for number in [begin, *shape, *strides])
        ):
            pass
        case _:
            raise CheckpointError(
                "an entry of the .bin file is not a tensor",
                where=where,
                expected="tensors by name",
                got="a tensor whose sizes are not numbers" if isinstance(value, _Tensor) else type(value).__name__,
                hint=HINT,
            )
    member, elements = members.get(key), math.prod(shape)
    last = begin + (sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1 if elements else 0)
    if member is None or last * kind.itemsize > member.nbytes:
        raise CheckpointError(
            "a tensor lies beyond its storage",
            where=where,
            expected=f"{last * kind.itemsize:,} bytes",
            got="no such storage" if member is None else f"{member.nbytes:,} bytes",
            hint="copy or download the file again",
        )
    plain = elements <= 1 or _is_contiguous(shape, strides)
    return StoredTensor(
        name=name,
        file=path,
        dtype_name=kind.dtype_name if plain else f"{kind.dtype_name} with strides {strides}",
        shape=shape,
        offset=member.offset + begin * kind.itemsize,
        nbytes=elements * kind.itemsize,
    )


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements lie in C order, one behind the other."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
