"""Calls an op's reference: arrays in, arrays out, with a batch and a cache where the op needs them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType
from ingot.plan import Attr, CacheGroup
from ingot.plugins.f8_rows import F8Rows
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.op import Array, Call, KvCache, Op, Operand
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.registry import find_op
from ingot.plugins.unit_rows import UnitRows
from ingot.plugins.weight_rows import WeightRows
from ingot.step_inputs import step_arrays
from ingot.step_io import StepBatch
from ingot.weight_formats import FORMATS, UNIT_COLUMNS

LAYOUT = CacheGroup(layers=(0, 1), kv_heads=2, head_dim=4, tokens_per_block=3, dtype=DType.F32)

_BY_ROWS = {
    "matmul": 1,
    "fp8_matmul": 2,
    "head_matmul": 1,
    "moe_gate_up": 2,
    "moe_down": 3,
    "fp8_moe_gate_up": 2,
    "fp8_moe_down": 3,
}  # op → its weight, which counts by rows


def random_array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_rows(n: int, k: int, group: int = 0) -> QuantisedRows:
    """A quantised weight: w8 where there is no group, else w4."""
    random = np.random.default_rng(n * k + group)
    scale = random.uniform(0.001, 0.1, n).astype(np.float32)
    if not group:
        return QuantisedRows(scale=scale, codes=random.integers(-127, 128, (n, k)).astype(np.int8))
    sizes = (n, -(-k // group))
    multipliers = random.integers(1, 16, sizes) * random.choice([-1, 1], sizes)
    codes = random.integers(-8, 8, (n, k)).astype(np.int8)
    return QuantisedRows(scale=scale, codes=codes, multipliers=multipliers.astype(np.int8), group=group)


def random_grouped(
    shape: tuple[int, ...],
    group: int,
    shift: str = "",
    *,
    more_bits: bool = False,
    byte_codes: bool = False,
    bits: int = 4,
) -> GroupedRows:
    """A weight [N, K], or [experts, N, K], in groups. shift: "zero", "offset" or none; then codes are of a table.
    byte_codes: values of all bytes in place of codes of so many bits."""
    random = np.random.default_rng(sum(shape) + group)
    groups = (*shape[:-1], -(-shape[-1] // group))
    table = (np.arange(16) if shift else random.integers(-127, 128, 16)).astype(np.int8)
    more = np.random.default_rng(group).integers(-128, 128, 16).astype(np.int8)
    numbers = random.uniform(-9, 9, groups) if shift == "offset" else random.integers(0, 16, groups)
    codes = random.integers(0, 1 << bits, shape).astype(np.uint8)
    if byte_codes:
        codes = random.integers(-128, 128, shape).astype(np.int8)
    return GroupedRows(
        scale=random.uniform(0.001, 0.1, shape[:-1]).astype(np.float32),
        codes=codes,
        group_scale=_halves(random.uniform(-1, 1, groups)),
        table=None if byte_codes else np.broadcast_to(table, (*shape[:-1], 16)).copy(),
        more_bits=np.broadcast_to(more, (*shape[:-1], 16)).copy() if more_bits and not byte_codes else None,
        shift=_halves(numbers) if shift else None,
        is_offset=np.full(shape[:-1], shift == "offset"),
        bits=bits,
        group=group,
    )


def random_units(dtype: str, shape: tuple[int, ...], group: int) -> UnitRows:
    """A weight [N, K], or [experts, N, K], of a format with units: all codes and all numbers of units."""
    random, described = np.random.default_rng(sum(shape) + group), FORMATS[dtype]
    groups, units = ((*shape[:-1], -(-shape[-1] // size)) for size in (group, UNIT_COLUMNS))
    low, high = described.codes

    def counts(lowest: int) -> npt.NDArray[np.int8]:
        return random.integers(lowest, 128, groups).astype(np.int8)

    def unit() -> Array:
        return _halves(random.uniform(-1, 1, units) / 64)

    shifted = described.group_bytes > 1
    return UnitRows(
        scale=random.uniform(0.001, 0.1, shape[:-1]).astype(np.float32),
        codes=random.integers(low, high + 1, shape).astype(np.int8),
        count=counts(0 if dtype in ("w2ks", "w4ks") else -128),
        unit=unit(),
        offset_count=counts(-128) if shifted else None,
        offset_unit=unit() if shifted else None,
        bits=described.bits,
        group=group,
    )


def random_f8(shape: tuple[int, ...], group: int = 0) -> F8Rows:
    """A weight [N, K], or [experts, N, K], of FP8: every byte that is a number."""
    random = np.random.default_rng(sum(shape) + group)
    codes = random.integers(0, 127, shape) | random.integers(0, 2, shape) << 7
    groups = (*shape[:-1], -(-shape[-1] // max(group, 1)))
    return F8Rows(
        scale=random.uniform(0.001, 0.1, shape[:-1]).astype(np.float32),
        codes=codes.astype(np.uint8),
        group_scale=random.uniform(0.001, 0.1, groups).astype(np.float32) if group else None,
        group=group,
    )


def group_of(dtype: str) -> int:
    """A group that a type has, as the names of kernels have it: the largest up to 64 columns; 0 where it has none."""
    described = FORMATS.get(dtype.removesuffix("a8"))
    return 0 if described is None else next((group for group in described.groups if group <= 64), 0)


def random_weight(dtype: str, n: int, k: int, group: int) -> WeightRows:
    """A weight of a quantised type as the names of kernels have it: w8, w4a8, w4tsa8, f8."""
    if dtype == "f8":
        return random_f8((n, k), group)
    if dtype.startswith(("w2t", "w3t", "w4t", "w8t")):
        return random_grouped(
            (n, k), group, "zero" if dtype[3:4] == "s" else "", byte_codes=dtype[1] == "8", bits=int(dtype[1])
        )
    name = dtype.removesuffix("a8")
    return random_units(name, (n, k), group) if FORMATS[name].unit_bytes else random_rows(n, k, group)


def _halves(values: npt.NDArray[np.floating] | npt.NDArray[np.integer]) -> Array:
    """Those that float16 holds."""
    return values.astype(np.float16).astype(np.float32)


def rows_of(dtype: str, n: int, k: int, index: int) -> WeightRows:
    """A weight of any quantised type; with the index, groups, shifts and the bits of values go round."""
    if dtype in ("w8", "w4"):
        return random_rows(n, k, (32, 64, 128)[index % 3] if dtype == "w4" else 0)
    if dtype == "f8":
        return random_f8((n, k), (0, 128, 16, 64, 32)[index % 5])
    if FORMATS[dtype].unit_bytes:
        groups = FORMATS[dtype].groups
        return random_units(dtype, (n, k), groups[index % len(groups)])
    shift, byte_codes = ("zero", "offset")[index % 2] if dtype.endswith("ts") else "", dtype.startswith("w8")
    groups, bits = FORMATS[dtype].groups[::-1], FORMATS[dtype].bits
    more, group = bits == 4 and index % 3 == 1, groups[index % len(groups)]
    return random_grouped((n, k), group, shift, more_bits=more, byte_codes=byte_codes, bits=bits)


def make_batch(
    ids: Sequence[int],
    counts: Sequence[int],
    past: Sequence[int],
    tables: Sequence[Sequence[int]],
    logit_rows: Sequence[int] = (),
) -> StepBatch:
    """counts[s] of the ids belong to sequence s, after past[s] tokens in the cache."""
    return StepBatch(
        ids=np.array(ids, np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        past_lengths=np.array(past, np.int32),
        block_tables=np.array([tables], np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        slots=np.full(len(past), -1, np.int32),
        draws=np.empty(0, np.int32),
    )


ONE_TOKEN = make_batch([0], [1], [0], [[0]])


def with_arrays(spec: Op, inputs: Sequence[Operand | None], batch: StepBatch) -> list[Operand | None]:
    """The inputs of a call, given without those that the batch brings along."""
    names = spec.with_batch(["" if value is None else "given" for value in inputs])
    values, arrays = iter(inputs), step_arrays(batch)
    return [
        (arrays[name] if name else None) if index in spec.batch_inputs else next(values, None)
        for index, name in enumerate(names)
    ]


def evaluate(
    op: str,
    inputs: Sequence[Array | WeightRows | None],
    attrs: dict[str, Attr],
    batch: StepBatch = ONE_TOKEN,
    kv: KvCache | None = None,
) -> tuple[Array, ...]:
    """The outputs of the reference, after the op has agreed to the number of inputs and the attributes."""
    spec = find_op(op)
    assert spec.problem(spec.with_batch(["" if value is None else "x" for value in inputs]), attrs) is None
    given = with_arrays(spec, inputs, batch)
    outputs = spec.reference(Call(inputs=given, attrs=attrs, batch=batch, kv=[kv or KvCache(LAYOUT, 6)]))
    by_rows = _BY_ROWS.get(op)
    columns = [
        None if value is None else value.shape[-2 if index == by_rows else -1] for index, value in enumerate(inputs)
    ]
    columns += [None] * len(spec.batch_inputs)
    assert tuple(output.shape[-1] for output in outputs) == spec.out_cols(columns, attrs)
    assert all(output.dtype == np.float32 for output in outputs)
    return outputs
