"""A session of `ref` one of whose kernels is wrong."""

import dataclasses
from collections.abc import Callable

import numpy as np

from ingot.plan import Step
from ingot.plugins.interpreter import Interpreter, Values
from ingot.plugins.op import Array
from ingot.plugins.ref.session import RefSession
from ingot.step_io import StepBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongInterpreter(Interpreter):
    wrong: str
    spoil: Callable[[Array], Array]

    def compute(self, step: Step, values: Values) -> dict[str, Array]:
        results = super().compute(step, values)
        return {name: self.spoil(each.copy()) for name, each in results.items()} if step.name == self.wrong else results


class WrongKernel(RefSession):
    """wrong: the name of the step; spoil: what it does to each result."""

    wrong: str
    spoil: Callable[[Array], Array]

    def _interpreter(self, batch: StepBatch) -> Interpreter:
        right = super()._interpreter(batch)
        return WrongInterpreter(weights=right.weights, batch=batch, kv=right.kv, wrong=self.wrong, spoil=self.spoil)


def spoil_one(values: Array) -> Array:
    values[-1, 3] += 1e-3 * np.abs(values).max()
    return values
