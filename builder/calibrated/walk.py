"""A calibration text through the model, one step after the other, all its tokens at once.

    step of a product   its inputs are collected → its weight is quantised → the step runs with what was made
    any other step      its op's reference

So every product is made for what the products before it leave of its inputs. One step's weight is in memory at a time;
activations are those of the text alone, and the keys and values of one layer.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ingot.builder.calibrated.methods import Found
from ingot.builder.expressions import WeightReader
from ingot.builder.pack import WeightUse
from ingot.builder.stored_weight import StoredWeight
from ingot.plan import CacheGroup, Plan, Step
from ingot.plugins.interpreter import Interpreter
from ingot.plugins.op import Array, Cache, Operand, make_cache
from ingot.plugins.ops import matmul
from ingot.plugins.registry import find_op
from ingot.plugins.weight_values import Inputs
from ingot.step_io import StepBatch

Parts = Mapping[int, Sequence[Array]]
"""expert → the inputs of its matrix, [tokens, K] each; 0 where there are no experts"""

Quantise = Callable[[Step, StoredWeight, Parts], Sequence[Found]]
"""The matrices of a product's weight, one for each expert; nothing: the weight stays as it is."""

TOKENS = 2048  # that a product of all of them is computed for at a time: its parts are larger than what it gives


def walk(
    plan: Plan,
    uses: Sequence[WeightUse],
    reader: WeightReader,
    windows: Sequence[Sequence[int]],
    products: Sequence[str],
    quantise: Quantise,
) -> None:
    """products: names of the steps whose weights `quantise` makes; the walk ends with the last of them."""
    last = max((i for i, step in enumerate(plan.steps) if step.name in products), default=-1)
    steps = plan.steps[: last + 1]
    weights = {use.name: StoredWeight(use=use, reader=reader) for use in uses}
    ends = {name: i for i, step in enumerate(steps) for name in (*step.inputs, *step.outputs, _layer(step))}
    values: dict[str, Array] = {}
    batch = _batch(plan, windows)
    caches: dict[str, list[Cache]] = {"": []}
    for i, step in enumerate(steps):
        layer = _layer(step)
        if layer not in caches:
            caches[layer] = [make_cache(_of_layer(group, int(layer)), len(windows)) for group in plan.caches]
        run = _Run(batch=batch, kv=caches[layer], weights=weights)
        with np.errstate(all="ignore"):  # a model may hold values that are not finite
            if step.name in products:
                run.quantise(step, values, quantise)
            if i < last:
                values.update(run.compute(step, values))
        for name in {*step.inputs, *step.outputs} - {""}:
            if ends[name] == i:
                values.pop(name, None)
        if layer and ends[layer] == i:
            del caches[layer]


def weight_name(step: Step) -> str:
    """The weight of a product."""
    packed = find_op(step.op).packed
    assert packed is not None, f"{step.name} is not a product"
    return step.inputs[packed]


def _layer(step: Step) -> str:
    """The layer whose keys, values or states a step writes or reads."""
    return str(step.attrs.get("layer", ""))


def _batch(plan: Plan, windows: Sequence[Sequence[int]]) -> StepBatch:
    """Each window is a sequence, in a block of its own."""
    starts = np.cumsum([0, *map(len, windows)]).astype(np.int32)
    tables = np.arange(len(windows), dtype=np.int32)[:, None]
    return StepBatch(
        ids=np.concatenate([np.asarray(window, np.int32) for window in windows]),
        query_starts=starts,
        past_lengths=np.zeros(len(windows), np.int32),
        block_tables=np.tile(tables, (len(plan.caches), 1, 1)),
        logit_rows=np.arange(starts[-1], dtype=np.int32),
        slots=np.full(len(windows), -1, np.int32),
        draws=np.empty(0, np.int32),
    )


def _of_layer(group: CacheGroup, layer: int) -> CacheGroup:
    place = group.layers.index(layer) if layer in group.layers else 0
    return dataclasses.replace(group, layers=(group.layers[place],), state=(group.state[place],) if group.state else ())


@dataclasses.dataclass(kw_only=True)
class _Run:
    """One step."""

    batch: StepBatch
    kv: Sequence[Cache]
    weights: Mapping[str, StoredWeight]
    made: "_Made | None" = None

    def compute(self, step: Step, values: Mapping[str, Array]) -> dict[str, Array]:
        interpreter = Interpreter(weights=self._weight, batch=self.batch, kv=self.kv)
        tokens = len(self.batch.ids)
        given = {name: values[name] for name in step.inputs if name in values}
        if step.op != matmul.OP.name or tokens <= TOKENS or any(len(each) != tokens for each in given.values()):
            return interpreter.compute(step, values)
        made: dict[str, Array] = {}
        for begin in range(0, tokens, TOKENS):
            part = slice(begin, begin + TOKENS)
            for name, found in interpreter.compute(step, {key: each[part] for key, each in given.items()}).items():
                made.setdefault(name, np.empty((tokens, *found.shape[1:]), found.dtype))[part] = found
        return made

    def quantise(self, step: Step, values: Mapping[str, Array], quantise: Quantise) -> None:
        """Make the step's weight."""
        weight = self.weights[weight_name(step)]
        collected = _Collected(use=weight.use, reader=weight.reader, parts={})
        with contextlib.suppress(_KnownError):
            Interpreter(
                weights=lambda of, name: collected if name == weight_name(of) else self._weight(of, name),
                batch=self.batch,
                kv=self.kv,
            ).compute(step, values)
        found = quantise(step, weight, collected.parts)
        self.made = _Made(use=weight.use, reader=weight.reader, found=found) if found else None

    def _weight(self, step: Step, name: str) -> Operand:
        if self.made is not None and name == self.made.use.name:
            return self.made
        return self.weights[name]


class _KnownError(Exception):
    """What a step multiplies is known; what it would make of the product is not wanted."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Collected(StoredWeight):
    """Keeps what it is multiplied with."""

    parts: dict[int, list[Array]]

    def products(self, parts: Sequence[tuple[int, Inputs]], activations: str) -> Iterator[Array]:
        for expert, x in parts:
            assert isinstance(x, np.ndarray), "of a plan in float32"
            self.parts.setdefault(expert, []).append(x)
        raise _KnownError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Made(StoredWeight):
    """Multiplies with the quantised matrices."""

    found: Sequence[Found]

    def read(self, begin: int, end: int) -> Array:
        expert, first = divmod(begin, self.shape[-2])
        return self.found[expert].rows(first, first + end - begin)
