"""Interprets the steps of a Plan in numpy: every step is the reference of its op.

who                what the weights are                  what it does between the steps
session of `ref`   packed weights of the engine          keeps what was asked for
calibration        floats of the checkpoint, by blocks   tells how far it is; its weights measure
comparison         packed weights, by blocks             goes on with the engine's own values
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from ingot.plan import Step
from ingot.plugins.op import Array, Cache, Call, Operand
from ingot.plugins.registry import find_op
from ingot.step_inputs import step_arrays
from ingot.step_io import Int32, StepBatch

Weights = Callable[[Step, str], Operand]
"""(step, name of a weight that it reads) → what the reference of its op takes for it"""


class Values(Protocol):
    """Activations by the name of their buffer."""

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Array: ...


class Buffers(Values, Protocol):
    """Activations that steps may write: a dictionary, or an arena."""

    def update(self, outputs: Mapping[str, Array], /) -> None:
        """Keep what a step has written. An output may be a view of what one of the same names holds."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interpreter:
    """weights: of the steps; batch, kv: what the steps work on, a pool for each cache group."""

    weights: Weights
    batch: StepBatch
    kv: Sequence[Cache]

    @functools.cached_property
    def given(self) -> Mapping[str, Int32]:
        """The inputs of the step, by name."""
        return step_arrays(self.batch)

    def run(self, steps: Sequence[Step], buffers: Buffers) -> Iterator[Step]:
        """Each step, when the buffers hold what it has written: until the next one is asked for, they may be read or
        replaced."""
        for step in steps:
            buffers.update(self.compute(step, buffers))
            yield step

    def compute(self, step: Step, values: Values) -> dict[str, Array]:
        """What one step writes, by buffer. Values stay as they are; what attention keeps goes into the cache."""
        inputs = [self._operand(step, name, values) for name in step.inputs]
        results = find_op(step.op).reference(Call(inputs=inputs, attrs=step.attrs, batch=self.batch, kv=self.kv))
        # trailing optional outputs may be left out
        return {name: result for name, result in zip(step.outputs, results, strict=False) if name}

    def _operand(self, step: Step, name: str, values: Values) -> Operand | None:
        if not name:
            return None
        if name in values:
            return values[name]
        return self.given[name] if name in self.given else self.weights(step, name)
