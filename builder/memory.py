"""Where activations lie in the arena: values that are never alive together share bytes.

step      0    1    2    3    4
embed     ■■■■■■■■■■■■■■■■■■■■■    sum of a norm may take over its residual's bytes (in place)
norm           ■■■■■■
qkv                 ■■■■■■
q                        ■■■■■■    lies where `norm` lay

An op may keep its inputs: rope_kv_write's stay as long as its queries, since an attention may rotate them again itself.
Sums over ranks are not written over in place: all ranks of a machine may read them from the same memory.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from ingot.dtypes import DType
from ingot.plan import Buffer, Rows

_ALIGNMENT = 64  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """An activation [rows, cols]. dtype: as it is stored; tensor: its name in the graph, "" for one that the graph has
    not."""

    rows: Rows
    cols: int
    dtype: DType = DType.F32
    tensor: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """The values of one step, by index. in_place: (output, input) pairs that may share their bytes; keeps_inputs: these
    stay as long as the outputs; of_ranks: the outputs may lie in memory of several ranks; None: absent."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    in_place: tuple[tuple[int, int], ...] = ()
    keeps_inputs: bool = False
    of_ranks: bool = False


@dataclasses.dataclass(kw_only=True, slots=True)
class _Slot:
    """Bytes that are alive from step `first` to step `last`, both included."""

    value: int
    nbytes: int
    first: int
    last: int
    offset: int = -1

    def meets(self, other: "_Slot") -> bool:
        return self.first <= other.last and other.first <= self.last


def plan_arena(
    values: Sequence[Value], uses: Sequence[Use], max_rows: Mapping[Rows, int], results: Sequence[int]
) -> tuple[list[Buffer], int]:
    """(buffer of each value, bytes of the arena). results: values that live on after the last step."""
    first, last = _lifetimes(len(values), uses, results)
    home = _share_in_place(values, uses, last)
    slots: dict[int, _Slot] = {}
    for index, value in enumerate(values):
        nbytes = -(-max_rows[value.rows] * value.cols * value.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        slot = slots.setdefault(home[index], _Slot(value=index, nbytes=nbytes, first=first[index], last=last[index]))
        slot.first, slot.last = min(slot.first, first[index]), max(slot.last, last[index])
    _place(list(slots.values()))
    arena = max((slot.offset + slot.nbytes for slot in slots.values()), default=0)
    return _named(values, [slots[home[index]].offset for index in range(len(values))]), arena


def _lifetimes(count: int, uses: Sequence[Use], results: Sequence[int]) -> tuple[list[int], list[int]]:
    first, last = [len(uses)] * count, [-1] * count
    for step, use in enumerate(uses):
        for index in (*use.inputs, *use.outputs):
            if index is not None:
                first[index], last[index] = min(first[index], step), max(last[index], step)
    for index in results:
        last[index] = len(uses)
    for use in reversed([use for use in uses if use.keeps_inputs]):
        longest = max((last[index] for index in use.outputs if index is not None), default=-1)
        for index in use.inputs:
            if index is not None:
                last[index] = max(last[index], longest)
    return first, last


def _share_in_place(values: Sequence[Value], uses: Sequence[Use], last: Sequence[int]) -> list[int]:
    """For each value the first value whose bytes it takes over, or itself."""
    home = list(range(len(values)))
    of_ranks = {value for use in uses if use.of_ranks for value in use.outputs}
    for step, use in enumerate(uses):
        for output, source in use.in_place:
            made, taken = use.outputs[output], use.inputs[source] if source < len(use.inputs) else None
            if made is None or taken is None or taken in of_ranks:
                continue
            if last[taken] != step or use.inputs.count(taken) > 1:
                continue
            if values[made] == values[taken]:
                home[made] = home[taken]
    return home


def _place(slots: list[_Slot]) -> None:
    """Largest first, each at the lowest offset that is free while it is alive."""
    placed: list[_Slot] = []
    for slot in sorted(slots, key=lambda slot: (-slot.nbytes, slot.first, slot.value)):
        offset = 0
        for other in sorted((other for other in placed if other.meets(slot)), key=lambda other: other.offset):
            if offset + slot.nbytes <= other.offset:
                break
            offset = max(offset, other.offset + other.nbytes)
        slot.offset = offset
        placed.append(slot)


def _named(values: Sequence[Value], offsets: Sequence[int]) -> list[Buffer]:
    """One Buffer per distinct place, type and shape: `tokens.256`, `tokens.256.2`, `tokens.256.bf16`."""
    known: dict[tuple[str, int], Buffer] = {}
    count = Counter[str]()
    for value, offset in zip(values, offsets, strict=True):
        kind = _kind(value)
        if (kind, offset) not in known:
            count[kind] += 1
            name = kind + (f".{count[kind]}" if count[kind] > 1 else "")
            buffer = Buffer(name=name, rows=value.rows, cols=value.cols, dtype=value.dtype, offset=offset)
            known[kind, offset] = buffer
    return [known[_kind(value), offset] for value, offset in zip(values, offsets, strict=True)]


def _kind(value: Value) -> str:
    return f"{value.rows.value}.{value.cols}" + ("" if value.dtype is DType.F32 else f".{value.dtype.value}")
