"""What an op is: its inputs, outputs and attributes, its shape rule, and its numpy reference (the specification).

Each file of `plugins/ops` defines one `OP`. A kernel computes an op; the `ref` target calls the reference itself.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import from_float32, to_float32
from ingot.plan import Attr, CacheGroup, Plan, Rows, Step
from ingot.plugins.attributes import AttrRule
from ingot.plugins.kv_codes import round_to_codes
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.weight_rows import WeightRows
from ingot.plugins.weight_values import HeldWeight, WeightValues
from ingot.plugins.work import WorkRule, plain_work
from ingot.step_io import Int32, StepBatch

Array = npt.NDArray[np.float32]
_Integers = npt.NDArray[np.integer[Any]]
Operand = Array | WeightRows | WeightValues | Int32
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

    group                     the cache group whose pool this is; layers are given by their numbers
    keys, values              float32 [layers of the group, blocks, kv_heads, tokens_per_block, head_dim], rounded to
                              the cache's dtype; int8 and f8: the codes; latent: values are a view of keys
    key_scales, value_scales  float32 [layers of the group, blocks, kv_heads, tokens_per_block]: what they are
                              multiplied with to give keys and values; 1 where there are no codes
    """

    def __init__(self, group: CacheGroup, num_blocks: int) -> None:
        self.group = group
        shape = (len(group.layers), num_blocks, group.kv_heads, group.tokens_per_block, group.head_dim)
        self.keys = np.full(shape, np.nan, dtype=np.float32)
        self.values = self.keys[..., : group.latent] if group.latent else np.full_like(self.keys, np.nan)
        fresh = np.nan if group.has_codes else 1
        self.key_scales, self.value_scales = (np.full(shape[:-1], fresh, dtype=np.float32) for _ in range(2))

    def write(self, layer: int, blocks: int | _Integers, slots: _Integers, keys: Array, values: Array) -> None:
        """Store tokens: the block and the slot in it of each, keys [tokens, kv_heads, head_dim] and values [tokens,
        kv_heads, value_dim]."""
        places = np.s_[self.place(layer), blocks, :, slots]
        self.keys[places], self.key_scales[places] = self._stored(keys)
        self.values[places], self.value_scales[places] = self._stored(values)

    def place(self, layer: int) -> int:
        """Index of a layer among those of the group."""
        return self.group.layers.index(layer)

    def read(self, layer: int, blocks: npt.NDArray[np.int32]) -> tuple[Array, Array]:
        """Keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads, value_dim] of the tokens of some blocks."""
        place = self.place(layer)
        gathered = [
            (numbers[place, blocks] * scales[place, blocks][..., None])
            .transpose(0, 2, 1, 3)
            .reshape(-1, self.group.kv_heads, numbers.shape[-1])
            for numbers, scales in ((self.keys, self.key_scales), (self.values, self.value_scales))
        ]
        return gathered[0], gathered[1]

    def parts(self, block: int) -> tuple[Array, ...]:
        """All that a block holds: views."""
        held = (self.keys, self.key_scales, self.value_scales, *(() if self.group.latent else (self.values,)))
        return tuple(each[:, block] for each in held)

    def _stored(self, rows: Array) -> tuple[Array, Array | float]:
        """[tokens, kv_heads, head_dim] → numbers and scales as the cache holds them."""
        if self.group.has_codes:
            codes, scales = round_to_codes(rows.reshape(-1, rows.shape[-1]), self.group.dtype)
            return codes.reshape(rows.shape), scales.reshape(rows.shape[:-1])
        return to_float32(from_float32(rows, self.group.dtype), self.group.dtype), 1


class StateCache:
    """Slots of recurrent states in numpy. A slot that nobody wrote holds NaN.

    group    the cache group whose slots these are
    numbers  float32 [slots, numbers of a slot]
    """

    def __init__(self, group: CacheGroup, num_slots: int) -> None:
        self.group = group
        self.numbers = np.full((num_slots, group.state_offsets[-1]), np.nan, dtype=np.float32)

    def parts(self, block: int) -> tuple[Array, ...]:
        """All that a slot holds: a view."""
        return (self.numbers[block],)

    def of(self, layer: int, slot: int) -> Array:
        """A layer's numbers in a slot: a view."""
        place = self.group.layers.index(layer)
        begin = self.group.state_offsets[place]
        numbers: Array = self.numbers[slot, begin : begin + self.group.state[place]]
        return numbers


Cache = KvCache | StateCache
"""The pool of a cache group."""


def make_cache(group: CacheGroup, num_blocks: int) -> Cache:
    """A fresh pool."""
    return StateCache(group, num_blocks) if group.state else KvCache(group, num_blocks)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateRun:
    """Tokens [begin, end) of a step, in which one sequence's state is carried on from one slot to another or the same.

    before  the state that it starts from: a copy, zeros for the first tokens of a sequence
    after   where it is left: a view of the slot
    """

    begin: int
    end: int
    before: Array
    after: Array


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One execution of an op by its reference.

    inputs  in the op's order: activations float32 [rows, cols]; weights unpacked to float32 in their logical shape or
            to quantised rows, or what reads them; inputs of the step (`step_inputs.py`) int32; None for an absent
            optional input
    kv      the pool of each cache group, of keys and values or of states
    """

    inputs: Sequence[Operand | None]
    attrs: Mapping[str, Attr]
    batch: StepBatch
    kv: Sequence[Cache]

    def cache(self, tables: int) -> tuple[KvCache, Int32]:
        """The pool of the cache group that the op's layer is in, and its block tables, [sequences, width].

        tables: the input that holds those of all groups
        """
        layer = int(self.attrs["layer"])
        number = next(i for i, each in enumerate(self.kv) if layer in each.group.layers)
        pool = self.kv[number]
        assert isinstance(pool, KvCache), f"layer {layer} keeps a state"
        return pool, self.integers(tables)[number]

    def state_runs(self, starts: int, past_lengths: int, tables: int) -> Iterator[StateRun]:
        """The stretches between the slots in which the state of the op's layer is left, for every sequence in order.
        The caller writes `after` of a stretch before it asks for the next one.

        starts, past_lengths, tables: the inputs that hold them, the tables those of all groups
        """
        layer = int(self.attrs["layer"])
        number = next(i for i, each in enumerate(self.kv) if layer in each.group.layers)
        pool, size = self.kv[number], self.kv[number].group.tokens_per_block
        assert isinstance(pool, StateCache), f"layer {layer} keeps keys and values"
        begins = self.integers(starts)
        for s, past in enumerate(self.integers(past_lengths)):
            slots, begin, last = self.integers(tables)[number, s], int(begins[s]), int(begins[s + 1])
            slot = int(slots[(past - 1) // size]) if past else -1
            while begin < last:
                place = (past + begin - begins[s]) // size
                while slots[place] < 0:
                    place += 1
                end = min(int((place + 1) * size - past + begins[s]), last)
                after = pool.of(layer, int(slots[place]))
                yield StateRun(
                    begin=begin,
                    end=end,
                    before=np.zeros_like(after) if slot < 0 else pool.of(layer, slot).copy(),
                    after=after,
                )
                begin, slot = end, int(slots[place])

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
        assert value.dtype == np.float32, f"input {index} is not an activation or a weight"
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
        return HeldWeight(held=value) if isinstance(value, WeightRows) else value


MOST_RANKS = 64  # of a tensor parallel group


def alone(call: Call) -> tuple[Array, ...]:
    """What a collective gives one rank by itself."""
    raise AssertionError("ranks compute this op together: a session of one rank refuses its plan")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """inputs: names; a trailing "?" marks an optional one. attrs: name → default, or the type if it must be given.

    out_cols      (columns of each input or None, attrs) → columns of each output
    rows          what the outputs' first dimension counts
    reference     Call → outputs; an optional output that nobody wants is still computed
    in_place      (output, input) pairs that may share their bytes
    size_problem  (shape of each input or None, attrs) → why they do not fit together, or None
    attr_rules    attribute → what it may be beside its type; others may be any value
    work          what a use of it moves and computes
    residual      the input that is added: to the results of a product, to the rows of a norm before it norms them
    norms         it norms its first input row by row; the second output, where wanted, is the sum that it normed
    packed        the input that is a product's weight, which targets may pack in panels
    gated         attrs → whether that weight's rows are gates, then ups
    routes        its first output names the experts that each row takes
    copies_rows   its output is rows of its first input: nothing is computed
    experts       that weight has a matrix for each expert; the second input names those that a row takes
    listed        the input that such kernels take the rows from which are sorted by expert: what an op with the mark
                  `lists` has made of the same numbers. `reference` does not read it
    lists         its output has int32 lists of all rows of a step, for kernels of other ops: what an engine was made
                  from has no such step, and what is in them depends on the step that a row is in
    stacked       that weight has a matrix for each head
    tables        inputs that are tables, weights of which it reads single rows → how many rows a plan needs there
    vectors       inputs that are weights with one dimension, float32
    derived       inputs that are weights made of the packed one: rows of that, quantised → the same rows of this
    unrounded     attrs → the input by which a product gets its first input as it is too, where that is rounded before:
                  it copies columns of it. None: it does not
    rounds        its output is its first input, rounded: what an engine was made from has no such step
    constants     inputs that are weights with the same numbers in every engine → these, given how many they are
    plain         a step of it → the step of another op that computes the same, all of it; itself without
    reads         rows of which a step wants nothing but the greatest number, 0 where it wants more → inputs that are
                  weights and read whole then; None: always all but tables
    batch_inputs  inputs that every step brings along, which steps name as the op does → the input that each goes with:
                  it is there where that one is
    of_tokens     its activations count tokens, never logit rows
    uses_kv       it reads or writes the KV cache: its attributes layer, kv_heads and head_dim are those of a plan's
    writes_kv     it writes there; else it only reads. Several steps may read what one has written
    latent        values there are the first numbers of keys: its attribute rank says how many
    overwrites    an output may have the bytes of any input, not only those of `in_place`: each is read before that
    is_step       plans have steps of it; else sessions do it beside their steps
    state         attrs → float32 numbers that a sequence keeps in the layer, for an op whose cache group has states
    keeps_inputs  activations that it reads stay as long as those that it writes, whose readers may make them anew
    decisive      inputs whose errors weigh more than those of a sum: they choose experts, or say how much of something
                  stays or is added. What multiplies to make one is never quantised
    monotone      each number of its output follows from the same number of its first input, and never falls where that
                  grows: such ops may stand between lm_head and the logits
    step_name     of the step, where a plan needs the op but once, outside of its layers
    collective    of an op that all ranks compute together: their inputs, in order → what each of them gets. Its
                  `reference` is `alone`
    transfer      of an op that takes rows from one pipeline stage to the next: what the one has sent → what the other
                  gets. Its `reference` is `alone`
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
    attr_rules: Mapping[str, AttrRule] = dataclasses.field(default_factory=dict)
    work: WorkRule = plain_work
    residual: int | None = None
    norms: bool = False
    routes: bool = False
    copies_rows: bool = False
    packed: int | None = None
    gated: Callable[[Mapping[str, Attr]], bool] = lambda attrs: False
    experts: bool = False
    listed: int | None = None
    lists: bool = False
    stacked: bool = False
    tables: Mapping[int, Callable[[Plan], int]] = dataclasses.field(default_factory=dict)
    vectors: tuple[int, ...] = ()
    derived: Mapping[int, Callable[[QuantisedRows], QuantisedRows]] = dataclasses.field(default_factory=dict)
    unrounded: Callable[[Mapping[str, Attr]], int | None] = lambda attrs: None
    rounds: bool = False
    constants: Mapping[int, Callable[[int], Array]] = dataclasses.field(default_factory=dict)
    plain: Callable[[Step], Step] = lambda step: step
    reads: Callable[[int], tuple[int, ...]] | None = None
    batch_inputs: Mapping[int, int] = dataclasses.field(default_factory=dict)
    of_tokens: bool = False
    uses_kv: bool = False
    writes_kv: bool = False
    latent: bool = False
    overwrites: bool = False
    is_step: bool = True
    keeps_inputs: bool = False
    decisive: tuple[int, ...] = ()
    monotone: bool = False
    step_name: str = ""
    collective: Callable[[Sequence[Array]], Array] | None = None
    transfer: Callable[[Sequence[Array]], Array] | None = None
    state: Callable[[Mapping[str, Attr]], int] | None = None

    @property
    def by_rows(self) -> bool:
        """Whether each row of the outputs depends on the same row of the activations alone."""
        elsewhere = self.uses_kv or self.of_tokens or self.batch_inputs or self.state or self.collective or self.lists
        return self.is_step and self.rows is None and not elsewhere

    @property
    def is_matmul(self) -> bool:
        """Whether it multiplies its first input with one packed matrix, all of it."""
        return self.packed is not None and not (self.experts or self.stacked or self.derived)

    @property
    def by_dtype(self) -> bool:
        """Whether its kernels differ by the type of a weight or of the KV cache; the others see float32 alone."""
        return self.packed is not None or bool(self.tables) or self.uses_kv

    @property
    def reads_kv(self) -> bool:
        """Whether it reads the KV cache: attention."""
        return self.uses_kv and not self.writes_kv

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
            if key in self.attr_rules and not self.attr_rules[key](value):
                return f"attribute {key} cannot be {value!r}"
        unknown = sorted(set(attrs) - set(self.attrs))
        return f"unknown attributes {unknown}" if unknown else None
