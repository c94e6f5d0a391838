"""Weights that are stored as integers: rows of the float32 values that their standard ops make of codes and scales.

DequantizeLinear by rows and groups of columns, Gather from a table or of columns, Cast, Reshape, Unsqueeze, Sub, Mul,
Div, Add. Rows are the first dimension of every node; what has another first dimension (tables, factors of columns) is
small and read whole.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from ingot.builder.graph import describe, producer, weight_shape
from ingot.dtypes import DType, from_float32, to_float32
from ingot.errors import BuildError

Array = npt.NDArray[Any]
Leaf = Callable[[gs.Constant, int, int], Array]
"""(initialiser, begin, end) → elements of its rows [begin, end) as numbers; a scalar is one row"""

_PACKED = {onnx.TensorProto.UINT4, onnx.TensorProto.INT4}
_ARITHMETIC = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
_INTEGERS = _PACKED | {onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.INT32, onnx.TensorProto.INT64}


def dequantises(node: gs.Node) -> bool:
    """Whether a weight's node computes its values from others than its own."""
    return node.op in ("DequantizeLinear", "Gather", "Mul", "Sub", "Div")


def is_dequantised(tensor: gs.Tensor) -> bool:
    """Whether a weight is made of codes and scales."""
    node = producer(tensor)
    return node is not None and (dequantises(node) or any(map(is_dequantised, node.inputs)))


def stored_as(element: int, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]] | None:
    """Type and shape of an initialiser's bytes, by ONNX's type of its elements: two codes of 4 bits share a byte."""
    if element in _PACKED:
        return (DType.U8, (*shape[:-1], shape[-1] // 2)) if shape and shape[-1] % 2 == 0 else None
    dtype = DType.from_onnx(element)
    return None if dtype is None else (dtype, shape)


def numbers(stored: Array, element: int) -> Array:
    """Stored bytes as float32 values or integers."""
    if element in _PACKED:
        codes = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)
        return codes if element == onnx.TensorProto.UINT4 else ((codes ^ 8) - np.uint8(8)).view(np.int8)
    dtype = DType.from_onnx(element)
    assert dtype is not None, "stored_as has found it"
    return stored if element in _INTEGERS else to_float32(stored, dtype)


def dequantised_rows(tensor: gs.Tensor, begin: int, end: int, leaf: Leaf) -> Array:
    """Rows [begin, end) of the first dimension of a weight, [end - begin, ...]."""
    node = producer(tensor)
    if node is None:
        return leaf(tensor, begin, end)
    rows = weight_shape(tensor)[0]

    def operand(each: gs.Tensor) -> Array:
        shape = weight_shape(each)
        if len(shape) == len(weight_shape(tensor)) and shape[0] == rows:
            return dequantised_rows(each, begin, end, leaf)
        return _whole(each, leaf)

    first = node.inputs[0]
    if node.op in _ARITHMETIC:
        left, right = map(operand, node.inputs)
        with np.errstate(all="ignore"):
            return np.asarray(_ARITHMETIC[node.op](left, right), np.float32)
    if node.op == "Cast":
        return _cast(dequantised_rows(first, begin, end, leaf), node)
    if node.op == "DequantizeLinear":
        return _dequantised(node, [operand(each) for each in node.inputs])
    if node.op in ("Reshape", "Unsqueeze") and weight_shape(first)[0] == rows:
        return dequantised_rows(first, begin, end, leaf).reshape(end - begin, *weight_shape(tensor)[1:])
    if node.op == "Gather":
        return _gathered(node, tensor, begin, end, leaf)
    raise BuildError("a quantised weight cannot be evaluated", where=describe(node))


def _whole(tensor: gs.Tensor, leaf: Leaf) -> Array:
    shape = weight_shape(tensor)
    return dequantised_rows(tensor, 0, shape[0] if shape else 1, leaf).reshape(shape)


def _cast(values: Array, node: gs.Node) -> Array:
    """Integers stay as they are, whatever their width: codes fit all of the types that they are cast to."""
    to = node.attrs["to"]
    if to in _INTEGERS and values.dtype.kind in "iu":
        return values
    dtype = DType.from_onnx(to)
    if dtype not in (DType.F32, DType.F16, DType.BF16):
        raise BuildError(
            "a quantised weight is cast to a type that ingot does not compute with",
            where=describe(node),
            expected="float32, float16 or bfloat16",
            got=f"ONNX type {to}",
        )
    found = np.asarray(values, np.float32)
    return found if dtype is DType.F32 else to_float32(from_float32(found, dtype), dtype)


def _dequantised(node: gs.Node, inputs: list[Array]) -> Array:
    """Blocks along the columns of a matrix, the last of which may be smaller."""
    codes, scale, *zeros = inputs
    block = node.attrs.get("block_size", 0)
    if node.attrs.get("axis", 1) not in (1, -1) or codes.ndim != 2 or not block or scale.ndim != 2:
        raise BuildError(
            "a DequantizeLinear of a weight has a form that ingot does not know",
            where=describe(node),
            expected="a matrix of codes, with axis 1 and block_size, and a scale for each block of columns",
            got=f"codes {list(codes.shape)}, scales {list(scale.shape)}, axis {node.attrs.get('axis', 1)}, "
            f"block_size {block}",
        )
    columns = codes.shape[1]
    if scale.shape != (len(codes), -(-columns // block)) or any(zero.shape != scale.shape for zero in zeros):
        raise BuildError(
            "the scales of a quantised weight do not fit its codes",
            where=describe(node),
            expected=str([len(codes), -(-columns // block)]),
            got=", ".join(str(list(each.shape)) for each in (scale, *zeros)),
        )
    values = codes.astype(np.float32)
    if zeros:
        values -= _spread(zeros[0].astype(np.float32), block, columns)
    with np.errstate(all="ignore"):
        values *= _spread(scale, block, columns)
    return values


def _spread(groups: Array, block: int, columns: int) -> Array:
    """[n, groups] → [n, columns]; one group goes by broadcasting."""
    return groups if groups.shape[1] == 1 else np.repeat(groups, block, axis=1)[:, :columns]


def _gathered(node: gs.Node, tensor: gs.Tensor, begin: int, end: int, leaf: Leaf) -> Array:
    """Values of a table by codes, or columns in another order."""
    values, indices = node.inputs
    axis, ndim = node.attrs.get("axis", 0), len(weight_shape(values))
    if axis == 0 and ndim == 1:
        table, codes = _whole(values, leaf), dequantised_rows(indices, begin, end, leaf)
    elif axis in (1, -1) and ndim == 2 and len(weight_shape(indices)) == 1:
        table, codes = dequantised_rows(values, begin, end, leaf), _whole(indices, leaf)
    else:
        raise BuildError(
            "this Gather of a quantised weight is not supported: it must look up codes in a table, or reorder columns",
            where=describe(node),
            expected="axis 0 of a vector, or axis 1 of a matrix with a vector of columns",
            got=f"axis {axis} of {ndim} dimensions",
        )
    size = table.shape[-1]
    if codes.size and not (-size <= int(codes.min()) and int(codes.max()) < size):
        raise BuildError(
            f"the codes of a weight point outside its table of {size} values",
            where=describe(node),
            expected=f"{-size} to {size - 1}",
            got=f"{int(codes.min())} to {int(codes.max())}",
            hint="the Checkpoint is damaged, or of another version: convert the model again",
        )
    return np.take(table, codes, axis=-1)
