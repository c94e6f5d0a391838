"""Runs a plan step by step with the numpy references of its ops.

Buffers live in one arena at the offsets that the builder planned, so that a plan whose buffers overlap while both
are alive gives wrong numbers here too.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import CapacityError
from ingot.plan import Buffer, Plan, Rows, Step
from ingot.plugins.op import Array, Call, KvCache
from ingot.plugins.ops.sample import sample
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.ref.check import check_steps
from ingot.plugins.ref.weights import read_weight
from ingot.plugins.registry import find_op
from ingot.plugins.target import SessionOptions
from ingot.step_io import Float32, SampleRows, StepBatch, StepResult


class RefSession:
    """Never looks at kernel names: a plan for cpu/amx runs as well as its own.

    kv  the paged cache; slots that nobody wrote hold NaN
    """

    def __init__(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> None:
        """Raises EngineError for a plan that cannot run, CapacityError."""
        check_steps(plan)
        self._logits, self._steps = plan.logits, plan.steps
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        read = {name for step in plan.steps for name in step.inputs}  # not the machine code of another target
        self._weights = {weight.name: read_weight(weights, weight) for weight in plan.weights if weight.name in read}
        self._arena = _fresh_arena(plan)
        self.num_blocks = options.num_blocks
        try:
            self.kv = KvCache(plan.kv, options.num_blocks)
        except MemoryError as error:
            raise CapacityError(
                "there is not enough memory for the KV cache", got=str(error), hint="pass a smaller kv_cache_memory"
            ) from error

    def run(self, batch: StepBatch) -> StepResult:
        """One pass over the plan's steps, then one draw per sampled row."""
        return self.run_tapped(batch, ())[0]

    def run_tapped(
        self, batch: StepBatch, steps: Sequence[str]
    ) -> tuple[StepResult, Mapping[str, Mapping[str, Float32]]]:
        """`run`, and what each of the named plan steps wrote: step → buffer → [rows, cols]."""
        wanted, tapped = frozenset(steps), dict[str, dict[str, Float32]]()
        for step in self._steps:
            inputs = [self._value(name, batch) for name in step.inputs]
            call = Call(inputs=inputs, attrs=step.attrs, batch=batch, kv=self.kv)
            self._store(step, [result.copy() for result in find_op(step.op).reference(call)], batch)
            if step.name in wanted:
                tapped[step.name] = {
                    name: self._view(self._buffers[name], batch).copy() for name in step.outputs if name
                }
        logits = self._view(self._buffers[self._logits], batch)
        drawn = sample(logits, batch.sample)
        return (dataclasses.replace(drawn, logits=logits.copy()) if batch.want_logits else drawn), tapped

    def read_kv(self, layer: int, block: int) -> tuple[Float32, Float32]:
        """Keys and values of a block."""
        keys, values = self.kv.keys[layer, block], self.kv.values[layer, block]
        scales = self.kv.key_scales[layer, block], self.kv.value_scales[layer, block]
        return keys * scales[0][..., None], values * scales[1][..., None]

    def draw(self, logits: Float32, rows: SampleRows) -> StepResult:
        """Draw from given logits."""
        return sample(logits, rows)

    def close(self) -> None:
        """Forget weights, arena and cache."""
        self._weights.clear()
        self._arena = np.empty(0, dtype=np.float32)
        del self.kv

    def _value(self, name: str, batch: StepBatch) -> Array | QuantisedRows | None:
        if not name:
            return None
        weight = self._weights.get(name)
        return self._view(self._buffers[name], batch) if weight is None else weight

    def _store(self, step: Step, results: list[Array], batch: StepBatch) -> None:
        for name, result in zip(step.outputs, results, strict=False):  # trailing optional outputs may be left out
            if name:
                self._view(self._buffers[name], batch)[...] = result

    def _view(self, buffer: Buffer, batch: StepBatch) -> Array:
        """The buffer's rows of this step: float32 [rows, cols] in the arena."""
        rows = len(batch.ids) if buffer.rows is Rows.TOKENS else len(batch.logit_rows)
        begin = buffer.offset // 4
        return self._arena[begin : begin + rows * buffer.cols].reshape(rows, buffer.cols)


def _fresh_arena(plan: Plan) -> Array:
    """NaN everywhere: a step that reads what none has written is found out."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if plan.arena_bytes > physical:
        raise CapacityError(
            "the activations are larger than this machine's memory",
            expected=f"at most {physical} bytes",
            got=f"{plan.arena_bytes} bytes",
            hint="build the engine with a smaller max_num_tokens",
        )
    return np.full(-(-plan.arena_bytes // 4), np.nan, dtype=np.float32)
