"""What an op is: its inputs, outputs and attributes, its shape rule, and its numpy reference (the specification).

Each file of `plugins/ops` defines one `OP`. A kernel computes an op; the `ref` target calls the reference itself.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, from_float32, to_float32
from ingot.plan import Attr, KvLayout, Rows
from ingot.plugins.quantised import QuantisedRows, round_to_int8
from ingot.plugins.weight_values import HeldWeight, WeightValues
from ingot.step_io import Int32, StepBatch

Array = npt.NDArray[np.float32]
Operand = Array | QuantisedRows | WeightValues | Int32
"""What an op takes: an activation, a weight that is in memory or that reads its numbers when they are asked for, or an
input of the step."""


Shape = tuple[int, ...]
"""Of a weight: as stored in the plan; of an activation: its columns alone."""
Shapes = Sequence[Shape | None]
SizeRule = Callable[[Shapes, Mapping[str, Attr]], str | None]


def unequal(name: str, shape: Shape | None, wanted: int) -> str | None:
    """What is wrong with an input that must have `wanted` columns or numbers, where it is there."""
    return None if shape is None or shape == (wanted,) else f"{name} has shape {shape} instead of ({wanted},)"


def as_wide_as_first(*names: str) -> SizeRule:
    """The rule of ops whose other inputs, these, have as many columns or numbers as the first."""

    def problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
        (cols,) = shapes[0] or (0,)
        found = (unequal(name, shape, cols) for name, shape in zip(names, shapes[1:], strict=True))
        return next((each for each in found if each), None)

    return problem


class KvCache:
    """Paged keys and values in numpy: the reference of every target's KV memory.

    Fresh slots hold NaN, so that a kernel that reads a slot nobody wrote is found out.

    keys, values              float32 [layers, blocks, kv_heads, tokens_per_block, head_dim], rounded to the cache's
                              dtype; int8: the codes
    key_scales, value_scales  float32 [layers, blocks, kv_heads, tokens_per_block]: what they are multiplied with to
                              give keys and values; 1 where the dtype is not int8
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        shape = (layout.num_layers, num_blocks, layout.kv_heads, layout.tokens_per_block, layout.head_dim)
        self.keys, self.values = (np.full(shape, np.nan, dtype=np.float32) for _ in range(2))
        fresh = np.nan if layout.dtype is DType.I8 else 1
        self.key_scales, self.value_scales = (np.full(shape[:-1], fresh, dtype=np.float32) for _ in range(2))

    def write(self, layer: int, block: int, slot: int, key: Array, value: Array) -> None:
        """Store one token's key and value, each [kv_heads, head_dim]."""
        slots = np.s_[layer, block, :, slot]
        self.keys[slots], self.key_scales[slots] = self._stored(key)
        self.values[slots], self.value_scales[slots] = self._stored(value)

    def read(self, layer: int, blocks: npt.NDArray[np.int32], length: int) -> tuple[Array, Array]:
        """Keys and values of the first `length` tokens of a block table, each [length, kv_heads, head_dim]."""
        gathered = [
            (numbers[layer, blocks] * scales[layer, blocks][..., None])
            .transpose(0, 2, 1, 3)
            .reshape(-1, self.layout.kv_heads, self.layout.head_dim)[:length]
            for numbers, scales in ((self.keys, self.key_scales), (self.values, self.value_scales))
        ]
        return gathered[0], gathered[1]

    def _stored(self, rows: Array) -> tuple[Array, Array | float]:
        """[kv_heads, head_dim] → numbers and scales as the cache holds them."""
        if self.layout.dtype is DType.I8:
            codes, scales = round_to_int8(rows)
            return codes.astype(np.float32), scales
        return to_float32(from_float32(rows, self.layout.dtype), self.layout.dtype), 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One execution of an op by its reference.

    inputs  in the op's order: activations float32 [rows, cols]; weights unpacked to float32 in their logical shape or
            to quantised rows, or what reads them; inputs of the step (`step_inputs.py`) int32; None for an absent
            optional input
    batch   the step's draws are in it, for `sample`; steps of a plan read their inputs alone
    """

    inputs: Sequence[Operand | None]
    attrs: Mapping[str, Attr]
    batch: StepBatch
    kv: KvCache

    def required(self, index: int) -> Array:
        """Input `index`, which must be present; quantised rows as the values that they stand for."""
        value = self.optional(index)
        assert value is not None, f"input {index} is required"
        return value

    def optional(self, index: int) -> Array | None:
        """Input `index`; quantised rows as the values that they stand for."""
        value = self.inputs[index]
        if value is None or not isinstance(value, np.ndarray):
            return None if value is None else value.values
        assert value.dtype == np.float32, f"input {index} is no activation or weight"
        return value.astype(np.float32, copy=False)

    def integers(self, index: int) -> Int32:
        """Input `index`, one of the step."""
        value = self.inputs[index]
        assert isinstance(value, np.ndarray), f"input {index} is none of the step"
        assert value.dtype == np.int32, f"input {index} is none of the step"
        return value.astype(np.int32, copy=False)

    def weight(self, index: int) -> WeightValues:
        """Input `index`, a weight."""
        value = self.inputs[index]
        assert value is not None, f"input {index} is required"
        if isinstance(value, np.ndarray):
            return HeldWeight(held=self.required(index))
        return HeldWeight(held=value) if isinstance(value, QuantisedRows) else value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """inputs: names; a trailing "?" marks an optional one. attrs: name → default, or the type if it must be given.

    out_cols      (columns of each input or None, attrs) → columns of each output
    rows          what the outputs' first dimension counts
    reference     Call → outputs; an optional output that nobody wants is still computed
    in_place      (output, input) pairs that may share their bytes
    size_problem  (shape of each input or None, attrs) → why they do not fit together, or None
    packed        the input that is a product's weight, which targets may pack in panels
    tables        inputs that are tables: weights of which it reads rows
    vectors       inputs that are weights with one dimension, float32
    batch_inputs  inputs that every step brings along, which steps name as the op does → the input that each goes with:
                  it is there where that one is
    of_tokens     its activations count tokens, never logit rows
    is_step       plans have steps of it; else sessions do it beside their steps
    keeps_inputs  activations that it reads stay as long as those that it writes, whose readers may make them anew
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr | type]
    out_cols: Callable[[Sequence[int | None], Mapping[str, Attr]], tuple[int, ...]]
    reference: Callable[[Call], tuple[Array, ...]]
    rows: Rows | None = None  # None: as the first activation input
    in_place: tuple[tuple[int, int], ...] = ()
    size_problem: SizeRule = lambda shapes, attrs: None
    packed: int | None = None
    tables: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()
    batch_inputs: Mapping[int, int] = dataclasses.field(default_factory=dict)
    of_tokens: bool = False
    is_step: bool = True
    keeps_inputs: bool = False

    def with_batch(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """The inputs of a step, given without those that every step brings along."""
        given = iter(inputs)
        names = ["" if index in self.batch_inputs else next(given, "") for index in range(len(self.inputs))]
        for index, needed_by in self.batch_inputs.items():
            names[index] = self.inputs[index].rstrip("?") if names[needed_by] else ""
        return tuple(names)

    def problem(self, num_inputs: Sequence[str], attrs: Mapping[str, Attr]) -> str | None:
        """Why a step with these inputs ("" = absent) and attributes is not a use of this op, or None."""
        if len(num_inputs) != len(self.inputs):
            return f"takes {len(self.inputs)} inputs, got {len(num_inputs)}"
        for name, given in zip(self.inputs, num_inputs, strict=True):
            if not given and not name.endswith("?"):
                return f"input {name} is missing"
        for index, needed_by in self.batch_inputs.items():
            role = self.inputs[index].rstrip("?")
            if num_inputs[index] != (role if num_inputs[needed_by] else ""):
                return f"input {role} must be {role if num_inputs[needed_by] else 'absent'}, got {num_inputs[index]!r}"
        for key, default in self.attrs.items():
            if key not in attrs:
                return f"attribute {key} is missing"
            wanted = default if isinstance(default, type) else type(default)
            if not isinstance(attrs[key], wanted):
                return f"attribute {key} must be {wanted.__name__}, got {attrs[key]!r}"
            if isinstance(value := attrs[key], float) and not math.isfinite(value):
                return f"attribute {key} must be finite, got {value!r}"
        unknown = sorted(set(attrs) - set(self.attrs))
        return f"unknown attributes {unknown}" if unknown else None
