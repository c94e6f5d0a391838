"""Scales and offsets that are whole numbers of units: how a Checkpoint says them, and which engine format keeps them.

Reshape(Mul(Reshape(Cast(integers), [0, units, groups of a unit]), Unsqueeze(Cast(units), -1)), [0, groups])
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ingot.builder.expressions import Float32, WeightReader, matrix_type
from ingot.builder.graph import is_op, producer, weight_shape
from ingot.dtypes import DType, Precision
from ingot.errors import CheckpointError
from ingot.plugins.quantised import Int8
from ingot.weight_formats import UNIT_COLUMNS, W2KS, W4KS, WeightFormat

# (bits of a stored code, whether it has a sign, whether there are offsets, columns of a group)
_FORMATS = {
    (4, False, True, 16): DType.W2KS,
    (4, True, False, 16): DType.W3K,
    (4, False, True, 32): DType.W4KS,
    (8, True, True, 32): DType.W5KS,
    (8, True, False, 16): DType.W6K,
    (8, True, False, 32): DType.W6K,
}
_COUNTS = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_LOWEST, _LARGEST = -128, 127  # of a signed byte


class InUnits(NamedTuple):
    """counts: [N, groups]. unit: [N, units]."""

    counts: gs.Tensor
    unit: gs.Tensor


class Kind(NamedTuple):
    """What decides on the format. columns: the first and the one behind the last that are taken, and those that the
    weight has."""

    bits: int
    signed: bool
    group: int
    scale: gs.Tensor
    offset: gs.Tensor | None
    columns: tuple[int, int, int]


def in_units(scales: gs.Tensor) -> InUnits | None:
    """The parts of scales [N, groups]; None of others."""
    product = producer(scales.inputs[0].inputs[0]) if is_op(producer(scales), "Reshape") else None
    if product is None or product.op != "Mul" or len(weight_shape(product.outputs[0])) != 3:
        return None
    by_unit, spread = map(producer, product.inputs)
    if not is_op(by_unit, "Reshape") or not is_op(spread, "Unsqueeze"):
        return None
    counts, unit = by_unit.inputs[0], spread.inputs[0]
    stored, (*units, _) = producer(counts), weight_shape(product.outputs[0])
    if not is_op(stored, "Cast") or matrix_type(stored.inputs[0]) not in _COUNTS:
        return None
    for_each_row = weight_shape(unit) == tuple(units) and weight_shape(spread.outputs[0]) == (*units, 1)
    return InUnits(counts, unit) if for_each_row and weight_shape(counts) == weight_shape(scales) else None


def unit_precision(kinds: Sequence[Kind], parts: int) -> Precision | None:
    """What keeps codes and numbers of units of rows that are one weight, also where sums over its columns are divided
    into so many parts; None where they are not all of one kind, or a part would cut a unit."""
    (found, *others) = {(each.bits, each.signed, each.offset is not None, each.group) for each in kinds}
    dtype = _FORMATS.get(found)
    if dtype is None or others or not all(_fits(each, parts) for each in kinds):
        return None
    return Precision(dtype=dtype, group=kinds[0].group)


def _fits(kind: Kind, parts: int) -> bool:
    first, last, columns = kind.columns
    if columns % UNIT_COLUMNS or first % UNIT_COLUMNS or (last - first) % (parts * UNIT_COLUMNS):
        return False
    numbers = [in_units(each) for each in (kind.scale, kind.offset) if each is not None]
    return all(each is not None and weight_shape(each.unit)[1] * UNIT_COLUMNS == columns for each in numbers)


def read_counts(
    reader: WeightReader, scales: gs.Tensor, begin: int, end: int, lowest: int = _LOWEST
) -> tuple[Int8, Float32]:
    """(whole numbers, units) of rows [begin, end). Raises CheckpointError where they do not fit the format."""
    found = in_units(scales)
    assert found is not None, "unit_precision has found it"
    counts = reader.read_numbers(found.counts, begin, end)
    unit = np.asarray(reader.read_numbers(found.unit, begin, end), np.float32)
    _require(counts, lowest, _LARGEST, reader.place(scales), "scales or offsets")
    with np.errstate(over="ignore"):
        if not np.array_equal(unit, unit.astype(np.float16), equal_nan=True):
            raise _unfit(reader.place(scales), "units that float16 holds", "others")
    return counts.astype(np.int8), unit


def read_codes(reader: WeightReader, codes: gs.Tensor, begin: int, end: int, described: WeightFormat) -> Int8:
    """Codes of rows [begin, end). Raises CheckpointError where they do not fit the format."""
    found = reader.read_numbers(codes, begin, end)
    _require(found, *described.codes, reader.place(codes), "codes")
    return found.astype(np.int8)


def lowest_scale(described: WeightFormat) -> int:
    """Kernels multiply some scales as numbers without a sign."""
    return 0 if described in (W2KS, W4KS) else _LOWEST


def _require(numbers: Float32 | Int8, low: int, high: int, where: str, what: str) -> None:
    if numbers.size and not (low <= numbers.min() and numbers.max() <= high):
        raise _unfit(where, f"{what} from {low} to {high}", f"{numbers.min():.0f} to {numbers.max():.0f}")


def _unfit(where: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        "a weight has numbers that its format, a K-quant of GGUF, cannot have",
        where=where,
        expected=expected,
        got=got,
        hint="convert the model again; or give --precision w8, which takes any numbers",
    )
