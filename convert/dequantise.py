"""A quantised weight in the Graph: standard ops from stored codes and scales to float32 [N, K], or to a stack of these.

    DequantizeLinear(codes, Cast(scale), zero, axis=1, block_size=group)      codes that are values
    (Gather(table, Cast(codes)) or Cast(codes) - zero) * scale + offset        codes of a table, zero points not whole
    scale and offset: Cast, or Cast of integers * Cast(units), [N, units, groups of a unit] as [N, groups]
    ... * or / factor of each row ... * columns ... Gather(order, axis=1) ... Reshape to a stack
    Concat of such matrices                                                    each with an order of columns of its own,
                                                                               or of different forms; some may be floats

Where columns share scales in groups, the second one computes [N, groups, group].
"""

import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ingot.convert.quantised.form import FLOATS, Code, Quantised, piece_name, unit_of
from ingot.dtypes import DType

_ONNX = {Code.U4: 21, Code.I4: 22, Code.U8: DType.U8.onnx, Code.I8: DType.I8.onnx, Code.F8: DType.F8.onnx}


class GraphWriter(Protocol):
    """What appends nodes and initialisers; methods take and return names of values."""

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: int | float | str | list[int]) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: "np.ndarray | np.float32") -> str: ...

    def float32(self, name: str) -> str: ...

    def weight(self, name: str, element: int | None = None, shape: Sequence[int] | None = None) -> str: ...


def dequantise(graph: GraphWriter, weight: Quantised) -> str:
    """Append the nodes of a weight; returns the float32 value."""
    path = weight.name.removesuffix("/weight")
    if weight.members:
        values = [dequantise(graph, each) for each in weight.members]
        return _stacked(graph, weight, graph.node("Concat", values, f"{path}/members", axis=0), path)
    if weight.code is Code.NONE:
        return graph.float32(piece_name(weight.name, FLOATS))
    zero = weight.pieces.get("zero")
    by_groups = bool(weight.table) or "offset" in weight.pieces or (zero is not None and zero.dtype is DType.F32)
    value = _by_groups(graph, weight, path) if by_groups else _standard(graph, weight, path)
    if "factor" in weight.pieces:
        op = "Div" if weight.divides else "Mul"
        value = graph.node(op, [value, graph.float32(piece_name(weight.name, "factor"))], f"{path}/factor")
    if "columns" in weight.pieces:
        value = graph.node("Mul", [value, graph.float32(piece_name(weight.name, "columns"))], f"{path}/columns")
    if "order" in weight.pieces:
        order = graph.weight(piece_name(weight.name, "order"))
        value = graph.node("Gather", [value, order], f"{path}/order", axis=1)
    return _stacked(graph, weight, value, path)


def _stacked(graph: GraphWriter, weight: Quantised, value: str, path: str) -> str:
    """Rows [N, K] as the matrices of a stack, where the weight is one."""
    if len(weight.shape) == 2:
        return value
    stack = graph.integers(f"stack_{'_'.join(map(str, weight.shape))}", weight.shape)
    return graph.node("Reshape", [value, stack], f"{path}/stack")


def _codes(graph: GraphWriter, weight: Quantised) -> str:
    """The initialiser [N, K]."""
    name = piece_name(weight.name, "codes")
    return graph.weight(name, _ONNX[weight.code], (weight.rows, weight.shape[-1]))


def _numbers(graph: GraphWriter, weight: Quantised, kind: str, path: str) -> str:
    """Scales, zero points or offsets of groups, float32 [N, groups]."""
    own = graph.float32(piece_name(weight.name, kind))
    if unit_of(kind) not in weight.pieces:
        return own
    groups, units = (weight.pieces[each].shape[1] for each in (kind, unit_of(kind)))
    sizes = [0, units, groups // units]
    own = graph.node(
        "Reshape", [own, graph.integers("units_{}_{}".format(*sizes[1:]), sizes)], f"{path}/{kind}/by_unit"
    )
    unit = graph.float32(piece_name(weight.name, unit_of(kind)))
    last = graph.integers("axis_last", [-1])
    unit = graph.node("Unsqueeze", [unit, last], f"{path}/{kind}/unit")
    value = graph.node("Mul", [own, unit], f"{path}/{kind}/times_unit")
    return graph.node("Reshape", [value, graph.integers(f"rows_of_{groups}", [0, groups])], f"{path}/{kind}/of_groups")


def _standard(graph: GraphWriter, weight: Quantised, path: str) -> str:
    inputs = [_codes(graph, weight), _numbers(graph, weight, "scale", path)]
    if "zero" in weight.pieces:
        zero = graph.weight(piece_name(weight.name, "zero"))
        packed = weight.code.packed
        inputs.append(graph.node("Cast", [zero], f"{path}/zero", to=_ONNX[weight.code]) if packed else zero)
    return graph.node("DequantizeLinear", inputs, f"{path}/dequantise", axis=1, block_size=weight.group)


def _by_groups(graph: GraphWriter, weight: Quantised, path: str) -> str:
    codes, columns = _codes(graph, weight), weight.shape[-1]
    if weight.table:
        values = np.array(weight.table, np.float32)
        table = graph.constant(f"const/table_{zlib.crc32(values.tobytes()):08x}", values)
        indices = graph.node("Cast", [codes], f"{path}/indices", to=DType.I32.onnx)
        value = graph.node("Gather", [table, indices], f"{path}/values", axis=0)
    else:
        value = graph.node("Cast", [codes], f"{path}/values", to=DType.F32.onnx)
    grouped = 1 < weight.group < columns
    if grouped:
        sizes = [0, columns // weight.group, weight.group]
        value = graph.node(
            "Reshape", [value, graph.integers("groups_{}_{}".format(*sizes[1:]), sizes)], f"{path}/groups"
        )
    for kind, op in (("zero", "Sub"), ("scale", "Mul"), ("offset", "Add")):
        if kind in weight.pieces:
            each = _numbers(graph, weight, kind, path)
            if grouped:
                each = graph.node("Unsqueeze", [each, graph.integers("axis_last", [-1])], f"{path}/{kind}/unsqueeze")
            value = graph.node(op, [value, each], f"{path}/{kind}/applied")
    if grouped:
        value = graph.node("Reshape", [value, graph.integers(f"rows_of_{columns}", [0, columns])], f"{path}/rows")
    return value
