"""The weights of a Checkpoint one by one, under the names that convert gave them: floats, or codes with their scales.

Codes are found by what the Graph makes of them, so those that `ingot quantize` made and those of a quantised source are
the same here. Rows are read when they are asked for.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ingot.builder.expressions import Float32, WeightReader, check_sources, stored_dtypes
from ingot.builder.graph import Graph, weight_shape
from ingot.builder.kept import read_grid
from ingot.checkpoint import Checkpoint
from ingot.dtypes import DType, from_float32
from ingot.errors import UnsupportedModelError

Numbers = npt.NDArray[Any]
Rows = Callable[[int, int], Numbers]
_LONGEST_PATH = 16  # nodes from codes to values


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredCodes:
    """W[n, k] = (value - zero[n, j]) * scale[n, j], j = k // group; the value is the code, or table[code].

    bits    4; 8, which are signed or FP8, and have no zero points
    floats  codes are the bits of E4M3FN numbers
    signed  whether codes are; those of a table never are
    codes   (begin, end) -> int8 or uint8 [rows, columns]
    scale, zero  (begin, end) -> float32 [rows, groups]; zero None: none
    """

    bits: int
    signed: bool
    group: int
    table: tuple[float, ...]
    codes: Rows
    scale: Rows
    zero: Rows | None
    floats: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointWeight:
    """A vector, or a matrix [rows, columns].

    dtype   of stored floats; None where there are codes
    read    (begin, end) -> float32 values [rows, columns]; a vector is one column
    bits    the same as they are stored, of floats
    others  what its codes are, if they are of another kind than `StoredCodes`
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType | None
    read: Callable[[int, int], Float32]
    bits: Rows
    codes: StoredCodes | None = None
    others: str = ""


class CheckpointWeights:
    """What `reader` reads of one Checkpoint. Raises CheckpointError for a weight whose bits are not there."""

    def __init__(self, checkpoint: Checkpoint, reader: WeightReader) -> None:
        self._checkpoint, self._reader = checkpoint, reader
        self._tensors = Graph.load(checkpoint.graph_path).surgeon.tensors()

    def find(self, name: str) -> CheckpointWeight:
        """By its name in the Checkpoint. Raises UnsupportedModelError for one that is not there."""
        for stored in (f"{name}/folded", name):
            if isinstance(self._tensors.get(stored), gs.Constant):
                return self._floats(name, self._tensors[stored])
        codes = self._tensors.get(f"{name}/codes")
        value = None if codes is None else _value_of(codes)
        kind = self._checkpoint.config.quantised.get(name, "")
        if value is None:
            raise UnsupportedModelError(
                "the graph does not have a weight of the model",
                where=f"{self._checkpoint.graph_path}: {name}",
                got=kind,
                hint="convert the model again",
            )
        found = self._codes(value)
        return CheckpointWeight(
            name=name,
            shape=weight_shape(value),
            dtype=None,
            read=lambda begin, end: self._reader.read_rows(value, begin, end),
            bits=lambda begin, end: self._reader.read_rows(value, begin, end),
            codes=found,
            others="" if found is not None else kind or "codes of another kind",
        )

    def _floats(self, name: str, tensor: gs.Constant) -> CheckpointWeight:
        check_sources(tensor, self._checkpoint)
        ((dtype, _),) = stored_dtypes(tensor)
        return CheckpointWeight(
            name=name,
            shape=weight_shape(tensor),
            dtype=dtype,
            read=lambda begin, end: self._reader.read_rows(tensor, begin, end),
            bits=lambda begin, end: self._reader.read_bits(tensor, begin, end),
        )

    def _codes(self, value: gs.Tensor) -> StoredCodes | None:
        check_sources(value, self._checkpoint)

        def rows(tensor: gs.Tensor) -> Rows:
            return lambda begin, end: self._reader.read_numbers(tensor, begin, end)

        def floats(tensor: gs.Tensor) -> Rows:
            return lambda begin, end: np.asarray(self._reader.read_numbers(tensor, begin, end), np.float32)

        def bits(tensor: gs.Tensor) -> Rows:
            return lambda begin, end: from_float32(self._reader.read_numbers(tensor, begin, end), DType.F8)

        grid = read_grid(value)
        if grid is None or grid.offset is not None or grid.factor is not None:
            return None
        if grid.bits == 8 and grid.zero is not None:
            return None
        return StoredCodes(
            bits=grid.bits,
            signed=grid.signed,
            group=grid.group,
            table=grid.table,
            codes=bits(grid.codes) if grid.floats else rows(grid.codes),
            scale=floats(grid.scale),
            zero=None if grid.zero is None else floats(grid.zero),
            floats=grid.floats,
        )


def _value_of(codes: gs.Tensor) -> gs.Tensor | None:
    """The last tensor on the way from codes to the product that is still a whole weight of known form."""
    tensor, found = codes, None
    for _ in range(_LONGEST_PATH):
        if len(tensor.outputs) != 1 or not tensor.outputs[0].outputs:
            break
        node = tensor.outputs[0]
        if node.op in ("MatMul", "Transpose", "Concat") or _looks_up(node, tensor):
            break
        tensor = found = node.outputs[0]
    return found


def _looks_up(node: gs.Node, table: gs.Tensor) -> bool:
    """Whether a node takes rows of a table for ids that it is given."""
    return node.op == "Gather" and node.inputs[0] is table and not isinstance(node.inputs[1], gs.Constant)
