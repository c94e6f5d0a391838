"""Runs a plan step by step with the numpy references of its ops.

Buffers live in one arena at the offsets that the builder planned, so that a plan whose buffers overlap while both
are alive gives wrong numbers here too.
"""

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.dtypes import from_float32, to_float32
from ingot.errors import CapacityError
from ingot.plan import Buffer, Plan, Rows
from ingot.plugins.interpreter import Interpreter
from ingot.plugins.op import Array, KvCache, make_cache
from ingot.plugins.ref.check import check_steps
from ingot.plugins.ref.weights import read_weight
from ingot.plugins.sequences import Sequences, step_result
from ingot.plugins.target import SessionOptions
from ingot.step_io import Ahead, Float32, Int32, SequenceRules, StepBatch, StepResult


class RefSession:
    """Never looks at kernel names: a plan for cpu/amx runs as well as its own.

    kv  the pool of each cache group; what nobody wrote is NaN
    """

    most_steps = 1
    takes_drafts = True

    def __init__(
        self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, *, ranks: int = 1, stages: int = 1
    ) -> None:
        """ranks, stages: that compute the model together. Raises EngineError where it cannot run, CapacityError."""
        check_steps(plan, ranks, stages)
        self._logits, self._steps = plan.logits, plan.steps
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        read = {name for step in plan.steps for name in step.inputs}  # not the machine code of another target
        self._weights = {weight.name: read_weight(weights, weight) for weight in plan.weights if weight.name in read}
        self._arena = _fresh_arena(plan)
        self._sequences = Sequences()
        self.num_blocks = options.num_blocks
        try:
            self.kv = [make_cache(group, n) for group, n in zip(plan.caches, options.num_blocks, strict=True)]
        except MemoryError as error:
            raise CapacityError(
                "there is not enough memory for the KV cache", got=str(error), hint="pass a smaller kv_cache_memory"
            ) from error

    def begin(self, batch: StepBatch) -> tuple[Interpreter, "Arena"]:
        """What computes one pass of this rank, and where its activations lie."""
        return self._interpreter(batch), Arena(self._arena, self._buffers, batch)

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Hold a sequence."""
        self._sequences.start(slot, rules, tokens, num_prompt)

    def end(self, slot: int) -> None:
        """Forget it."""
        self._sequences.end(slot)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One pass over the plan's steps, then the draws."""
        return self.run_tapped(batch, ())[0]

    def run_tapped(
        self, batch: StepBatch, steps: Sequence[str]
    ) -> tuple[StepResult, Mapping[str, Mapping[str, Float32]]]:
        """`run`, and what each of the named plan steps wrote: step → buffer → [rows, cols]."""
        wanted, tapped = frozenset(steps), dict[str, dict[str, Float32]]()
        batch = self._sequences.complete(batch)
        arena = Arena(self._arena, self._buffers, batch)
        for step in self._interpreter(batch).run(self._steps, arena):
            if step.name in wanted:
                tapped[step.name] = {name: arena[name].copy() for name in step.outputs if name}
        return step_result(self._sequences, batch, arena[self._logits]), tapped

    def read_kv(self, layer: int, block: int) -> tuple[Float32, Float32]:
        """Keys and values of a block."""
        kv = next(each for each in self.kv if layer in each.group.layers)
        assert isinstance(kv, KvCache), f"layer {layer} keeps a state"
        at = kv.place(layer), block
        keys, values, scales = kv.keys[at], kv.values[at], (kv.key_scales[at], kv.value_scales[at])
        return keys * scales[0][..., None], values * scales[1][..., None]

    def block_bytes(self, group: int) -> int:
        """See `BlockSession`."""
        return sum(part.nbytes for part in self.kv[group].parts(0))

    def read_block(self, group: int, block: int, to: npt.NDArray[np.uint8]) -> None:
        """See `BlockSession`."""
        to[...] = np.concatenate([part.ravel() for part in self.kv[group].parts(block)]).view(np.uint8)

    def write_block(self, group: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        """See `BlockSession`."""
        offset = 0
        for part in self.kv[group].parts(block):
            part[...] = data[offset : offset + part.nbytes].view(np.float32).reshape(part.shape)
            offset += part.nbytes

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Draw from given logits."""
        return self._sequences.draw(slots, logits, raw)

    def close(self) -> None:
        """Forget weights, arena and cache."""
        self._weights.clear()
        self._arena = np.empty(0, dtype=np.uint8)
        del self.kv

    def _interpreter(self, batch: StepBatch) -> Interpreter:
        return Interpreter(weights=lambda _, name: self._weights[name], batch=batch, kv=self.kv)


class Arena:
    """The buffers of a plan in one array, with the rows of one batch."""

    def __init__(self, memory: npt.NDArray[np.uint8], buffers: Mapping[str, Buffer], batch: StepBatch) -> None:
        self._memory, self._buffers = memory, buffers
        self._rows = {Rows.TOKENS: len(batch.ids), Rows.LOGITS: len(batch.logit_rows)}

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    def __getitem__(self, name: str) -> Array:
        """Float32 [rows, cols]: a view where the buffer is float32."""
        return to_float32(self._stored(name), self._buffers[name].dtype)

    def update(self, outputs: Mapping[str, Array]) -> None:
        """Rounded to the buffers' types. Copies come first: a step may write over what another result is a view of."""
        for name, result in {name: result.copy() for name, result in outputs.items()}.items():
            self._stored(name)[...] = from_float32(result, self._buffers[name].dtype)

    def _stored(self, name: str) -> npt.NDArray[np.generic]:
        buffer = self._buffers[name]
        rows, begin = self._rows[buffer.rows], buffer.offset
        numbers = self._memory[begin : begin + rows * buffer.cols * buffer.dtype.itemsize]
        return numbers.view(buffer.dtype.storage).reshape(rows, buffer.cols)


def _fresh_arena(plan: Plan) -> npt.NDArray[np.uint8]:
    """NaN everywhere, in every type: a step that reads what none has written is found out."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if plan.arena_bytes > physical:
        raise CapacityError(
            "the activations are larger than this machine's memory",
            expected=f"at most {physical} bytes",
            got=f"{plan.arena_bytes} bytes",
            hint="build the engine with a smaller max_num_tokens",
        )
    return np.full(plan.arena_bytes, 0xFF, dtype=np.uint8)
