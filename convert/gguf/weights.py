"""Tensors of a GGUF file as the weights of a Hugging Face model: floats as they lie, blocks as codes and scales."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.convert.gguf.header import GgufTensor
from ingot.convert.gguf.packing import Packing, Take
from ingot.convert.quantised.finite import with_finite_values
from ingot.convert.quantised.form import Piece, Quantised, Rows, code_piece, streamed_piece, unit_of, value_piece
from ingot.dtypes import DType
from ingot.errors import CheckpointError
from ingot.tensor_file import StoredTensor, read_rows


def as_weight(
    tensor: GgufTensor, name: str, factors: npt.NDArray[np.float32] | None = None
) -> StoredTensor | Quantised:
    """The tensor under its Hugging Face name. factors: of a tensor of blocks, one for each of its matrices."""
    if tensor.type.packing is None:
        return StoredTensor(
            name=name,
            file=tensor.file,
            dtype_name=tensor.type.dtype,
            shape=tensor.shape,
            offset=tensor.offset,
            nbytes=tensor.nbytes,
        )
    return _quantised(tensor, name, tensor.type.packing, factors)


def part_of_stack(tensor: GgufTensor, index: int) -> GgufTensor:
    """One of the matrices of a stack [experts, rows, columns]."""
    size = tensor.nbytes // tensor.shape[0]
    return dataclasses.replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + index * size)


def factors_of(tensor: GgufTensor, count: int) -> npt.NDArray[np.float32]:
    """One for each matrix of a tensor. Raises CheckpointError."""
    stored = as_weight(tensor, tensor.name)
    expected = f"F32, {'a finite number' if count == 1 else f'{count:,} finite numbers'} other than 0"
    if not isinstance(stored, StoredTensor) or tensor.type.dtype != "F32" or math.prod(tensor.shape) != count:
        got = f"{tensor.type.name} {list(tensor.shape)}"
    else:
        values = read_rows(stored).reshape(-1).view(np.float32)
        if np.isfinite(values).all() and values.all():
            return values
        got = ", ".join(map(str, values[:4].tolist()))
    raise CheckpointError(
        "the scale of a quantised weight is not usable",
        where=f"{tensor.file}: {tensor.name}",
        expected=expected,
        got=got,
    )


def _quantised(tensor: GgufTensor, name: str, packing: Packing, factors: npt.NDArray[np.float32] | None) -> Quantised:
    kind = tensor.type
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    blocks = columns // kind.size
    stored = StoredTensor(
        name=tensor.name,
        file=tensor.file,
        dtype_name="U8",
        shape=(rows, blocks * kind.nbytes),
        offset=tensor.offset,
        nbytes=tensor.nbytes,
    )

    def rows_of(take: Take) -> Callable[[int, int], npt.NDArray[Any]]:
        def read(begin: int, end: int) -> npt.NDArray[Any]:
            raw = read_rows(stored, begin, end).view(np.uint8).reshape(-1, kind.nbytes)
            with np.errstate(all="ignore"):  # scales that are no numbers are refused by name
                return take(raw).reshape(end - begin, -1)

        return read

    def codes() -> Rows:
        return rows_of(packing.codes)

    shape = (rows, columns // packing.group)
    where = f"{tensor.file}: {tensor.name}"
    pieces: dict[str, Piece] = {
        "codes": code_piece(packing.code, (rows, columns), codes),
        "scale": streamed_piece(packing.scale_dtype, shape, rows_of(packing.scale), where),
    }
    if packing.offset is not None:
        pieces["offset"] = streamed_piece(packing.offset_dtype, shape, rows_of(packing.offset), where)
    for piece, take in (("scale", packing.scale_unit), ("offset", packing.offset_unit)):
        if take is not None:
            pieces[unit_of(piece)] = streamed_piece(DType.F16, (rows, blocks), rows_of(take), where)
    if factors is not None:
        of_rows = np.repeat(factors, rows // len(factors)).reshape(rows, 1)
        pieces["factor"] = value_piece(DType.F32, (rows, 1), lambda: of_rows, where)
    weight = Quantised(
        name=name,
        format=f"gguf {kind.name}",
        file=tensor.file,
        shape=tensor.shape,
        code=packing.code,
        group=packing.group,
        pieces=pieces,
        table=packing.table,
    )
    return with_finite_values(weight)
