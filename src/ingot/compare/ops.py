"""One step by itself: the op's numpy reference, fed with what the engine's kernel was fed with.

How far a kernel may be off follows from the arithmetic: each rounding moves a value by at most one part in 2^24, and K
of them in a sum add up like a few times sqrt(K). So the bound of an output is a few times sqrt(K) roundings of the
largest value in its row, and of what the same rounding of the inputs would do to it. For the latter the reference is
computed a second time with inputs that are moved by one part in 2^10, whatever the op is.

The units that attention runs on, of GPUs, AMX and AVX-512 BF16, take queries and probabilities in the cache's type.
And GPUs store what only 16-bit products read in their type, half a step off.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ingot.compare.packed import PackedWeight, PackedWeights
from ingot.compare.places import are_numbers, vanish
from ingot.dtypes import KV_CODES, DType, from_float32, to_float32
from ingot.plan import Plan, Step
from ingot.plugins.interpreter import Interpreter
from ingot.plugins.op import Array, Cache, KvCache, make_cache
from ingot.plugins.registry import find_op
from ingot.step_io import StepBatch

ROUNDING = 2.0**-24  # of float32, relative
MOVED = 2.0**-10  # how far inputs are moved to see what that does to the result
CACHE = ("keys", "values")  # what rope_kv_write writes beside its output
SLACK = 32.0  # roundings that every kernel may make beside those of its sums
# Distance of neighbours: of a float relative to itself, of int8 relative to the largest number of its token and head;
# F16_STEP: of f16 at zero, F8_STEP: of f8, relative to that largest number.
KV_ROUNDING = {DType.F32: 0.0, DType.BF16: 2.0**-7, DType.F16: 2.0**-10, DType.F8: 2.0**-3, DType.I8: 1 / 127}
F16_STEP = 2.0**-24
F8_STEP = 2.0**-9 / 448
# How the names of kernels end that multiply in the type of the cache, or codes in bf16.
MATRIX_UNITS = (".sm80", ".sm89", ".sm90a", ".amx", ".avx512bf16")
FP8_SUMS = 2.0**-14  # relative error of sums of FP8 numbers on the matrix units of GPUs, which keep 14 bits
TIMES_ROUNDED = 4.0  # queries once, probabilities once, and what chance adds
# How often inputs are moved where rounded queries decide the bound. A row of sharp attention hangs on the score of one
# or two tokens, which a single draw may happen to leave in place.
DRAWS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutputError:
    """The value that is farthest beyond its bound, or nearest to it: what it is, what the reference says, the bound.

    ratio  largest difference over bound: above 1 is wrong
    """

    what: str
    place: str
    got: float
    expected: float
    bound: float
    ratio: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KvPools:
    """Keys and values of one layer in the engine's cache, each [blocks, kv_heads, tokens_per_block, head_dim]."""

    keys: Array
    values: Array


def same_bits(what: str, got: Array, expected: Array) -> OutputError:
    """For what is handed over, or added up in a fixed order: nothing may be off."""
    other = np.argwhere((got != expected) & ~(np.isnan(got) & np.isnan(expected)))
    row, col = other[0] if len(other) else (0, 0)
    return OutputError(
        what=what,
        place=f"token {row}, column {col}",
        got=float(got[row, col]),
        expected=float(expected[row, col]),
        bound=0.0,
        ratio=float("inf") if len(other) else 0.0,
    )


class StepChecker:
    """batch: the step that all tapped outputs belong to."""

    def __init__(self, packed: PackedWeights, plan: Plan, batch: StepBatch, threads: int) -> None:
        self._packed, self._batch, self._threads = packed, batch, threads
        self._caches, self._kv_dtype = plan.caches, plan.caches[0].dtype
        self._multiplied_rounding = KV_ROUNDING[DType.BF16 if self._kv_dtype in KV_CODES else self._kv_dtype]
        self._noise = np.random.default_rng(0)
        self._stored = {buffer.name: buffer.dtype for buffer in plan.buffers}

    def check(
        self, step: Step, inputs: Mapping[str, Array], outputs: Mapping[str, Array], pools: KvPools | None
    ) -> OutputError:
        """inputs: what the buffers held before the step. pools: of the step's layer, where it has one."""
        width = max((values.shape[1] for values in inputs.values()), default=1)
        op = find_op(step.op)
        if op.reads_kv or op.state is not None:  # sums over tokens
            width += len(self._batch.ids)
        roundings = ROUNDING * (SLACK + 4 * np.sqrt(width))
        of_inputs, draws = roundings, 1
        if op.reads_kv and step.kernel.endswith(MATRIX_UNITS):
            of_inputs, draws = of_inputs + TIMES_ROUNDED * self._multiplied_rounding / 2, DRAWS
        if op.packed is not None and step.attrs["activations"] == "fp8" and step.kernel.endswith(MATRIX_UNITS):
            of_inputs += FP8_SUMS
        exact = {name for name, role in zip(step.inputs, op.inputs, strict=True) if role == "ids"}
        changes: dict[str, Array] = {}
        for _ in range(draws):
            moved = {name: values if name in exact else self._moved(values) for name, values in inputs.items()}
            compared = list(self._compared(step, inputs, moved, outputs, pools))
            for what, _, expected, other in compared:
                changed = _largest(other - expected)
                changes[what] = np.maximum(changes.get(what, changed), changed)
        found: list[OutputError] = []
        for what, got, expected, _ in compared:
            changed, largest = changes[what], _largest(expected)
            bound = of_inputs * changed / MOVED + roundings * largest / 2
            if what in CACHE:
                bound = bound + _step(self._kv_dtype, np.abs(expected), largest)
            elif (dtype := self.stored_type(step)) in (DType.BF16, DType.F16):
                bound = bound + _step(dtype, np.abs(expected), largest) / 2
            found.append(_worst(step, what, got, expected, np.broadcast_to(bound, got.shape)))
        return max(found, key=lambda each: each.ratio)

    def stored_type(self, step: Step) -> DType:
        """In which the step's first output lies."""
        return self._stored[step.outputs[0]]

    def _compared(
        self,
        step: Step,
        inputs: Mapping[str, Array],
        moved: Mapping[str, Array],
        outputs: Mapping[str, Array],
        pools: KvPools | None,
    ) -> Iterator[tuple[str, Array, Array, Array]]:
        """(what, the engine's, the reference's, the reference's of the moved inputs), each [rows, cols]."""
        if find_op(step.op).packed is not None:  # reading a weight costs more than a few rows
            both = {name: np.concatenate([values, moved[name]]) for name, values in inputs.items()}
            (result,) = self._reference(step, both, self._cache(step, 0)).values()
            expected, other = np.split(result, 2)
            yield "output", outputs[step.outputs[0]], expected, other
            return
        moved_pools = None if pools is None else KvPools(keys=self._moved(pools.keys), values=self._moved(pools.values))
        of_moved = self._pairs(step, moved, outputs, moved_pools)
        for (what, got, expected), (_, _, other) in zip(
            self._pairs(step, inputs, outputs, pools), of_moved, strict=True
        ):
            yield what, got, expected, other

    def _moved(self, values: Array) -> Array:
        noise = self._noise.uniform(-1, 1, values.shape).astype(np.float32)
        return values * (1 + np.float32(MOVED) * noise)

    def _pairs(
        self, step: Step, inputs: Mapping[str, Array], outputs: Mapping[str, Array], pools: KvPools | None
    ) -> Iterator[tuple[str, Array, Array]]:
        """(what, the engine's, the reference's), each [rows, cols]."""
        cache = self._cache(step, len(pools.keys) if pools is not None else len(self._batch.past_lengths))
        if find_op(step.op).reads_kv and pools is not None:
            assert isinstance(cache, KvCache), "pools are of a layer with keys and values"
            cache.keys[0], cache.values[0] = pools.keys, pools.values
        for name, result in self._reference(step, inputs, cache).items():
            yield "output", outputs[name], result
        if find_op(step.op).writes_kv and pools is not None:
            assert isinstance(cache, KvCache), "pools are of a layer with keys and values"
            written = _written(self._batch, pools.keys)
            for what, got, wanted in zip(
                CACHE, (pools.keys, pools.values), (cache.keys[0], cache.values[0]), strict=True
            ):
                if self._kv_dtype in KV_CODES:  # one scale for all: NaN in one place makes the row NaN
                    wanted = np.where(np.isfinite(wanted).all(axis=-1, keepdims=True), wanted, np.float32(np.nan))
                yield what, _rows_of(np.where(written, got, 0)), _rows_of(np.where(written, wanted, 0))

    def _reference(self, step: Step, inputs: Mapping[str, Array], cache: Cache) -> dict[str, Array]:
        """What the op's reference writes, by buffer. cache: of the step's layer."""
        number = self._group(step)
        batch = dataclasses.replace(self._batch, block_tables=self._batch.block_tables[number : number + 1])
        return Interpreter(weights=self._weight, batch=batch, kv=[cache]).compute(step, inputs)

    def _group(self, step: Step) -> int:
        """The number of the step's cache group; any where it has no layer."""
        return next((i for i, group in enumerate(self._caches) if step.attrs.get("layer") in group.layers), 0)

    def _cache(self, step: Step, num_blocks: int) -> Cache:
        """A float32 pool for the step's layer alone. num_blocks: or slots, of a layer with a state."""
        group, layer = self._caches[self._group(step)], int(step.attrs.get("layer", 0))
        state = (group.state[group.layers.index(layer)],) if group.state else ()
        return make_cache(dataclasses.replace(group, layers=(layer,), dtype=DType.F32, state=state), num_blocks)

    def _weight(self, step: Step, name: str) -> PackedWeight:
        return PackedWeight(packed=self._packed, name=name, threads=self._threads)


def rounded(values: Array, dtype: DType) -> Array:
    """The nearest values of a type."""
    return to_float32(from_float32(values, dtype), dtype)


def _largest(values: Array) -> Array:
    """Magnitude in each row, of what is a finite number; [rows, 1]."""
    largest: Array = np.abs(np.where(np.isfinite(values), values, 0)).max(axis=1, initial=0.0, keepdims=True)
    return largest


def _step(dtype: DType, at: Array, largest: Array) -> Array:
    """Distance of neighbouring numbers of a type, at a magnitude; largest: of the numbers that share a scale."""
    if dtype is DType.I8:
        return KV_ROUNDING[dtype] * largest
    at_zero = F16_STEP if dtype is DType.F16 else F8_STEP * largest if dtype is DType.F8 else 0.0
    found: Array = KV_ROUNDING[dtype] * at + at_zero
    return found


def _rows_of(pool: Array) -> Array:
    return pool.reshape(-1, pool.shape[-1])


def _written(batch: StepBatch, pool: Array) -> npt.NDArray[np.bool_]:
    """Which slots of a pool the step has written, [blocks, 1, tokens_per_block, 1]."""
    found = np.zeros((len(pool), pool.shape[2]), np.bool_)
    for table, past, count in zip(batch.block_tables[0], batch.past_lengths, np.diff(batch.query_starts), strict=True):
        places = np.arange(past, past + count)
        found[table[places // pool.shape[2]], places % pool.shape[2]] = True
    return found[:, None, :, None]


def _worst(step: Step, what: str, got: Array, expected: Array, bound: Array) -> OutputError:
    difference, same = np.abs(got - expected), are_numbers(got) == are_numbers(expected)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(difference == 0, 0.0, difference / bound)
    ratio = np.where(are_numbers(got) & are_numbers(expected), ratio, np.where(same, 0.0, np.inf))
    ratio = np.where(vanish(step, got, expected), 0.0, ratio)
    row, col = np.unravel_index(np.argmax(ratio), ratio.shape)
    place = f"{'slot' if what in CACHE else 'token'} {row}, column {col}"
    return OutputError(
        what=what,
        place=place,
        got=float(got[row, col]),
        expected=float(expected[row, col]),
        bound=float(bound[row, col]),
        ratio=float(ratio[row, col]),
    )
