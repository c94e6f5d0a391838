"""Weight expressions: Cast, Transpose, Concat, Slice, Reshape, Unsqueeze, Add, MatMul over initialisers, and what makes
the values of quantised ones (`dequantise.py`), read in blocks as float32.

`read_rows` evaluates rows [begin, end) of an expression without ever holding more of the weight in memory. Vectors
count as matrices with one column.
"""

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from ingot.builder.dequantise import dequantised_rows, dequantises, is_dequantised, numbers, stored_as
from ingot.builder.graph import describe, is_op, producer, scalar, slice_of, weight_shape
from ingot.checkpoint import Checkpoint
from ingot.chunks import CheckedFile
from ingot.dtypes import DType, from_float32, to_float32
from ingot.errors import BuildError, CheckpointError

Float32 = npt.NDArray[np.float32]
Bits = npt.NDArray[Any]
Block = tuple[int, int, int, int]  # rows [0, 1), columns [2, 3)
_RESHAPING = ("Reshape", "Unsqueeze")
_OF_FIRST = (*_RESHAPING, "Slice")  # whose other inputs are no weights
_SWAPPED = [0, 2, 1]


def key(tensor: gs.Tensor) -> tuple[object, ...]:
    """What a weight is, apart from its name: equal keys are equal values."""
    if isinstance(tensor, gs.Constant):
        proto = _external(tensor)
        if proto is not None:
            place = sorted((entry.key, entry.value) for entry in proto.external_data)
            return ("external", *place, proto.data_type, tuple(proto.dims))
        values = np.ascontiguousarray(tensor.values)
        return ("inline", hashlib.sha256(values.tobytes()).hexdigest(), str(values.dtype), values.shape)
    node = tensor.inputs[0]
    attrs = tuple(sorted((name, str(value)) for name, value in node.attrs.items()))
    return (node.op, attrs, *(key(each) for each in node.inputs))


def leaves(tensor: gs.Tensor) -> Iterator[str]:
    """Names of the initialisers under a weight."""
    if isinstance(tensor, gs.Constant):
        yield str(tensor.name)
        return
    node = tensor.inputs[0]
    for each in node.inputs[:1] if node.op in _OF_FIRST else node.inputs:
        yield from leaves(each)


def stored_dtypes(tensor: gs.Tensor) -> Iterator[tuple[DType, int]]:
    """(stored type, bytes) of every initialiser under a weight; the values of a quantised one count as w8."""
    if is_dequantised(tensor) and not is_op(producer(tensor), "Concat"):
        yield DType.W8, int(np.prod(weight_shape(tensor)))
        return
    if isinstance(tensor, gs.Constant):
        dtype = _dtype(tensor)
        yield dtype, int(np.prod(tensor.shape)) * dtype.itemsize
        return
    node = tensor.inputs[0]
    if node.op == "Slice":
        dtype, nbytes = next(stored_dtypes(node.inputs[0]))
        yield dtype, nbytes * int(np.prod(weight_shape(tensor))) // int(np.prod(weight_shape(node.inputs[0])))
        return
    for each in node.inputs[:1] if node.op in _OF_FIRST else node.inputs:
        yield from stored_dtypes(each)


def matrix_type(tensor: gs.Tensor) -> int | None:
    """ONNX's type of the numbers of a stored matrix; None for anything else."""
    proto = _external(tensor) if isinstance(tensor, gs.Constant) else None
    return int(proto.data_type) if proto is not None and len(proto.dims) == 2 else None


def is_copy(tensor: gs.Tensor, dtype: DType) -> bool:
    """Whether an expression only moves stored values of `dtype` about: rounding it to that type changes nothing."""
    if isinstance(tensor, gs.Constant):
        return _external(tensor) is not None and _dtype(tensor) is dtype
    node = tensor.inputs[0]
    if node.op == "Cast":
        return DType.from_onnx(node.attrs["to"]) in (DType.F32, dtype) and is_copy(node.inputs[0], dtype)
    if node.op in _OF_FIRST:
        return is_copy(node.inputs[0], dtype)
    return node.op in ("Transpose", "Concat") and all(is_copy(each, dtype) for each in node.inputs)


def check_sources(tensor: gs.Tensor, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if an initialiser under a weight points outside the checkpoint, at bytes not there, or at
    more or fewer than it has."""
    if not isinstance(tensor, gs.Constant):
        for each in tensor.inputs[0].inputs:
            check_sources(each, checkpoint)
    elif (proto := _external(tensor)) is not None:
        location, offset = _place(proto)
        stored = stored_as(proto.data_type, tuple(proto.dims))
        if stored is None:
            raise _unreadable(tensor, proto.data_type)
        needed = checkpoint.external(
            tensor.name, location=location, offset=offset, dtype=stored[0], shape=stored[1]
        ).nbytes
        length = int(_entries(proto).get("length", needed))
        if length != needed:
            raise CheckpointError(
                "the graph gives a weight another number of bytes than its type and shape need",
                where=f"{checkpoint.graph_path}: {tensor.name}",
                expected=f"{needed:,} bytes for {list(proto.dims)}",
                got=f"{length:,} bytes",
                hint="convert the model again",
            )


def matrix_shape(tensor: gs.Tensor) -> tuple[int, int]:
    """[rows, cols] of a weight; a vector is one column, the matrices of a stack lie one below the other."""
    shape = weight_shape(tensor)
    if len(shape) == 2:
        return shape[0], shape[1]
    longer = [size for size in shape if size != 1]
    if len(longer) <= 1:
        return (longer[0] if longer else 1), 1
    if len(shape) != 3:
        raise BuildError("a weight has more than 3 dimensions", where=tensor.name, got=str(list(shape)))
    return shape[0] * shape[1], shape[2]


class WeightReader:
    """Reads weight expressions of one checkpoint, whose sources have been checked; from several threads. What it gives
    out has the checksums that convert wrote."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, CheckedFile] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def place(self, tensor: gs.Tensor) -> str:
        """Where a tensor is, for errors."""
        return f"{self._checkpoint.graph_path}: {tensor.name}"

    def read_rows(self, tensor: gs.Tensor, begin: int, end: int) -> Float32:
        """Rows [begin, end) as float32 [end - begin, cols]."""
        return self._read(tensor, begin, end, 0, matrix_shape(tensor)[1])

    def read_bits(self, tensor: gs.Tensor, begin: int, end: int) -> Bits:
        """Rows [begin, end) as they are stored [end - begin, cols], of an expression that `is_copy`."""
        return self._read(tensor, begin, end, 0, matrix_shape(tensor)[1], bits=True)

    def read_numbers(self, tensor: gs.Tensor, begin: int, end: int) -> Bits:
        """Rows [begin, end) of a part of a quantised weight: codes as integers of a byte, all else as it is."""
        return dequantised_rows(tensor, begin, end, self._numbers)

    def _read(self, tensor: gs.Tensor, r0: int, r1: int, c0: int, c1: int, *, bits: bool = False) -> Bits:
        node = producer(tensor)
        if node is None:
            return self._leaf(tensor, r0, r1, c0, c1, bits)
        if node.op == "Cast" and bits:
            return self._read(node.inputs[0], r0, r1, c0, c1, bits=True)
        if node.op == "Cast":
            dtype = DType.from_onnx(node.attrs["to"])
            if dtype not in (DType.F32, DType.F16, DType.BF16):
                raise BuildError("a weight is cast to a type that ingot does not compute with", where=describe(node))
            values = self._read(node.inputs[0], r0, r1, c0, c1)
            return to_float32(from_float32(values, dtype), dtype)
        if (moved := self._moved(node, tensor, (r0, r1, c0, c1), bits)) is not None:
            return moved
        if dequantises(node) or (is_dequantised(tensor) and (node.op == "Add" or _moves_rows(tensor))):
            return self._dequantised(tensor, (r0, r1, c0, c1))
        if node.op == "MatMul":
            return self._product(node, (r0, r1, c0, c1))
        if node.op == "Add":
            return self._sum(node, matrix_shape(tensor), (r0, r1, c0, c1))
        if node.op == "Reshape" and len(weight_shape(tensor)) == 1:
            return self._flattened(node.inputs[0], r0, r1, bits)
        if node.op in _RESHAPING and matrix_shape(tensor) == matrix_shape(node.inputs[0]):
            return self._read(node.inputs[0], r0, r1, c0, c1, bits=bits)
        if node.op == "Reshape" and matrix_shape(tensor)[1] == 1:  # rows one after the other
            cols = matrix_shape(node.inputs[0])[1]
            first, last = r0 // cols, -(-r1 // cols)
            flat = self._read(node.inputs[0], first, last, 0, cols, bits=bits).reshape(-1, 1)
            return flat[r0 - first * cols : r1 - first * cols, c0:c1]
        raise BuildError("a weight expression cannot be evaluated", where=describe(node))

    def _dequantised(self, tensor: gs.Tensor, block: Block) -> Float32:
        """A block of what is made of codes and scales, or of values and factors; of a stack whole matrices are read."""
        r0, r1, c0, c1 = block
        rows, cols = matrix_shape(tensor)
        each = rows // weight_shape(tensor)[0]
        first, last = r0 // each, -(-r1 // each)
        values = np.asarray(dequantised_rows(tensor, first, last, self._numbers), np.float32).reshape(-1, cols)
        return values[r0 - first * each : r1 - first * each, c0:c1]

    def _flattened(self, matrix: gs.Tensor, begin: int, end: int, bits: bool) -> Bits:
        """Numbers [begin, end) of a matrix, row after row, as a column."""
        cols = matrix_shape(matrix)[1]
        first = begin // cols
        rows = self._read(matrix, first, -(-end // cols), 0, cols, bits=bits)
        return rows.reshape(-1, 1)[begin - first * cols : end - first * cols]

    def _moved(self, node: gs.Node, tensor: gs.Tensor, block: Block, bits: bool) -> Bits | None:
        """A block of a matrix that has its numbers from elsewhere as they are; None of another weight."""
        ndim = len(weight_shape(tensor))
        if node.op == "Transpose" and ndim == 2:
            return self._transposed(node, block, bits)
        if node.op == "Concat" and node.attrs["axis"] in (0, 1, -1, -2) and ndim <= 2:
            return self._concat(node, block, bits)
        if node.op == "Slice" and (ndim == 2 or slice_of(node)[2] == ndim - 1):
            begin, _, axis = slice_of(node)
            rows, cols = (begin, 0) if axis == 0 else (0, begin)
            r0, r1, c0, c1 = block
            return self._read(node.inputs[0], r0 + rows, r1 + rows, c0 + cols, c1 + cols, bits=bits)
        if ndim == 3 and _moves_matrices(node):
            return self._of_stack(node, block, bits)
        return None

    def _transposed(self, node: gs.Node, block: Block, bits: bool) -> Bits:
        r0, r1, c0, c1 = block
        if list(node.attrs.get("perm", [1, 0])) == [0, 1]:
            return self._read(node.inputs[0], r0, r1, c0, c1, bits=bits)
        return self._read(node.inputs[0], c0, c1, r0, r1, bits=bits).T

    def _of_stack(self, node: gs.Node, block: Block, bits: bool) -> Bits:
        """A block of the rows of some matrices of a stack, one matrix after the other: transposed ones, or those of
        which a Slice takes some rows."""
        if node.op == "Concat":
            return self._joined_stacks(node, block, bits)
        r0, r1, c0, c1 = block
        _, rows, cols = weight_shape(node.inputs[0])
        begin, end = slice_of(node)[:2] if node.op == "Slice" else (0, cols)
        made, pieces = end - begin, []
        while r0 < r1:
            matrix, first = divmod(r0, made)
            last = min(made, first + r1 - r0)
            if node.op == "Slice":
                at = matrix * rows + begin
                pieces.append(self._read(node.inputs[0], at + first, at + last, c0, c1, bits=bits))
            else:
                at = matrix * rows
                pieces.append(self._read(node.inputs[0], at + c0, at + c1, first, last, bits=bits).T)
            r0 += last - first
        return np.concatenate(pieces) if pieces else np.empty((0, c1 - c0), np.float32)

    def _joined_stacks(self, node: gs.Node, block: Block, bits: bool) -> Bits:
        """A block of stacks whose matrices lie one below the other, expert by expert."""
        r0, r1, c0, c1 = block
        sizes = [weight_shape(each)[1] for each in node.inputs]
        pieces = []
        for matrix in range(r0 // sum(sizes), -(-r1 // sum(sizes))):
            begin = matrix * sum(sizes)
            for each, size in zip(node.inputs, sizes, strict=True):
                low, high = max(r0 - begin, 0), min(r1 - begin, size)
                if low < high:
                    pieces.append(self._read(each, matrix * size + low, matrix * size + high, c0, c1, bits=bits))
                begin += size
        return np.concatenate(pieces) if pieces else np.empty((0, c1 - c0), np.float32)

    def _sum(self, node: gs.Node, shape: tuple[int, int], block: Block) -> Float32:
        """A block of the sum of two weights of one shape, or of a weight and a number."""
        numbers = [scalar(each) for each in node.inputs]
        if any(
            number is None and matrix_shape(each) != shape for number, each in zip(numbers, node.inputs, strict=True)
        ):
            got = " and ".join(str(list(weight_shape(each))) for each in node.inputs)
            raise BuildError("the graph adds weights of different shapes", where=describe(node), got=got)
        first, second = (
            self._read(each, *block) if number is None else np.float32(number)
            for number, each in zip(numbers, node.inputs, strict=True)
        )
        return np.asarray(first + second, np.float32)

    def _product(self, node: gs.Node, block: Block) -> Float32:
        """A block of the product of two matrices. Sums of float64 hardly depend on how the matrices are cut."""
        r0, r1, c0, c1 = block
        inner = matrix_shape(node.inputs[1])[0]
        left, right = self._read(node.inputs[0], r0, r1, 0, inner), self._read(node.inputs[1], 0, inner, c0, c1)
        return (left.astype(np.float64) @ right.astype(np.float64)).astype(np.float32)

    def _concat(self, node: gs.Node, block: Block, bits: bool) -> Bits:
        r0, r1, c0, c1 = block
        ndim = len(weight_shape(node.inputs[0]))
        axis = node.attrs["axis"] % ndim
        begin, end = (r0, r1) if axis == 0 else (c0, c1)
        pieces, start = [], 0
        for each in node.inputs:
            size = matrix_shape(each)[axis]
            low, high = max(begin - start, 0), min(end - start, size)
            if low < high:
                part = (low, high, c0, c1) if axis == 0 else (r0, r1, low, high)
                pieces.append(self._read(each, *part, bits=bits))
            start += size
        return np.concatenate(pieces, axis=axis) if pieces else np.empty((r1 - r0, c1 - c0), np.float32)

    def _leaf(self, tensor: gs.Constant, r0: int, r1: int, c0: int, c1: int, bits: bool) -> Bits:
        rows, cols = matrix_shape(tensor)
        proto, dtype = _external(tensor), _dtype(tensor)
        if proto is None:
            return np.asarray(tensor.values, np.float32).reshape(rows, cols)[r0:r1, c0:c1]
        location, base = _place(proto)
        if c0 == 0 and c1 == cols:
            data = self._open(location).read(base + r0 * cols * dtype.itemsize, (r1 - r0) * cols * dtype.itemsize)
        else:
            offsets = (base + (row * cols + c0) * dtype.itemsize for row in range(r0, r1))
            width = (c1 - c0) * dtype.itemsize
            file = self._open(location)
            data = b"".join(file.read(offset, width) for offset in offsets)
        stored = np.frombuffer(data, dtype.storage).reshape(r1 - r0, c1 - c0)
        return stored if bits else to_float32(stored, dtype)

    def _numbers(self, tensor: gs.Constant, begin: int, end: int) -> Bits:
        """Rows [begin, end) of an initialiser of any number of dimensions and type, as numbers."""
        shape = tuple(int(size) for size in tensor.shape)
        proto = _external(tensor)
        if proto is None:
            values = np.asarray(tensor.values)
            return (values.astype(np.float32) if values.dtype.kind == "f" else values).reshape(shape or 1)[begin:end]
        stored = stored_as(proto.data_type, shape)
        if stored is None:
            raise _unreadable(tensor, proto.data_type)
        dtype, lies = stored
        (location, base), row = _place(proto), int(np.prod(lies[1:])) * dtype.itemsize
        data = self._open(location).read(base + begin * row, (end - begin) * row)
        return numbers(np.frombuffer(data, dtype.storage).reshape(end - begin, *lies[1:]), proto.data_type)

    def _open(self, location: str) -> CheckedFile:
        with self._opening:
            if location not in self._files:
                self._files[location] = self._checkpoint.open_weights(location)
            return self._files[location]


def _external(tensor: gs.Constant) -> onnx.TensorProto | None:
    """The reference to external data behind an initialiser, None for inline values."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    proto: onnx.TensorProto = tensor._values.tensor  # public `.values` would read the file
    return proto


def _place(proto: onnx.TensorProto) -> tuple[str, int]:
    """(file, offset in bytes) of external data."""
    entries = _entries(proto)
    return entries["location"], int(entries.get("offset", 0))


def _entries(proto: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.external_data}


def _dtype(tensor: gs.Constant) -> DType:
    proto = _external(tensor)
    number = proto.data_type if proto is not None else _onnx_number(tensor.dtype)
    dtype = DType.from_onnx(number)
    if dtype is None or dtype not in (DType.F32, DType.F16, DType.BF16):
        raise _unreadable(tensor, number)
    return dtype


def _unreadable(tensor: gs.Constant, number: int) -> BuildError:
    return BuildError(
        "a weight is stored in a type that ingot does not build from",
        where=tensor.name,
        expected="f32, f16, bf16; integers where DequantizeLinear, or a table and scales, say what they stand for",
        got=onnx.TensorProto.DataType.Name(number),
    )


def _moves_matrices(node: gs.Node) -> bool:
    """Whether a node transposes each matrix of a stack, takes rows of each, or puts rows of several together."""
    if node.op == "Concat":
        return node.attrs["axis"] in (1, -2)
    if node.op == "Slice":
        return slice_of(node)[2] == 1
    return bool(node.op == "Transpose" and list(node.attrs.get("perm", ())) == _SWAPPED)


def _moves_rows(tensor: gs.Tensor) -> bool:
    """Whether a Reshape changes the columns of each row, in another way than by laying rows one behind the other."""
    node = tensor.inputs[0]
    if node.op != "Reshape" or matrix_shape(tensor) == matrix_shape(node.inputs[0]):
        return False
    return weight_shape(tensor)[0] == weight_shape(node.inputs[0])[0]


def _onnx_number(dtype: npt.DTypeLike | int) -> int:
    return dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
