"""All ranks of an engine in one process: each step of every rank, then the next one. So the ranks meet at collectives
without waiting, and what they compute is what any arrangement of processes computes."""

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import REBUILD, EngineError
from ingot.plan import Plan, Step
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_op
from ingot.plugins.sequences import Sequences, step_result
from ingot.plugins.target import SessionOptions
from ingot.step_io import Ahead, Float32, Int32, SequenceRules, StepBatch, StepResult


class RanksSession:
    """The first rank draws: all of them have the same logits."""

    most_steps = 1

    def __init__(
        self, plans: Sequence[Plan], weights: Sequence[npt.NDArray[np.uint8]], options: SessionOptions
    ) -> None:
        """Raises EngineError for plans that do not go together, CapacityError."""
        _require_alike(plans)
        self._plans = plans
        self._sequences = Sequences()
        self.num_blocks = options.num_blocks
        with contextlib.ExitStack() as opened:
            self._ranks = [
                opened.enter_context(contextlib.closing(RefSession(plan, own, options, ranks=len(plans))))
                for plan, own in zip(plans, weights, strict=True)
            ]
            self._opened = opened.pop_all()

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Hold a sequence."""
        self._sequences.start(slot, rules, tokens, num_prompt)

    def end(self, slot: int) -> None:
        """Forget it."""
        self._sequences.end(slot)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One pass over the steps of all ranks, then the draws."""
        batch = self._sequences.complete(batch)
        begun = [rank.begin(batch) for rank in self._ranks]
        for steps in zip(*(plan.steps for plan in self._plans), strict=True):
            collective = find_op(steps[0].op).collective
            if collective is None:
                for step, (interpreter, arena) in zip(steps, begun, strict=True):
                    arena.update(interpreter.compute(step, arena))
                continue
            together = collective([arena[step.inputs[0]] for step, (_, arena) in zip(steps, begun, strict=True)])
            for step, (_, arena) in zip(steps, begun, strict=True):
                arena.update({step.outputs[0]: together})
        return step_result(self._sequences, batch, begun[0][1][self._plans[0].logits])

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Draw from given logits."""
        return self._sequences.draw(slots, logits, raw)

    def close(self) -> None:
        """Forget everything of every rank."""
        self._opened.close()


def _require_alike(plans: Sequence[Plan]) -> None:
    """Raises EngineError unless all ranks take the same steps and meet in the same collectives."""

    def meets(step: Step) -> tuple[object, ...]:
        collective = find_op(step.op).collective is not None
        return (step.op, tuple(step.attrs.items()) if collective else ())

    first = [meets(step) for step in plans[0].steps]
    for rank, plan in enumerate(plans):
        if [meets(step) for step in plan.steps] != first or plan.limits != plans[0].limits:
            raise EngineError(
                "the rank files of the engine do not belong together",
                where=f"rank {rank}",
                expected="the steps and limits of rank 0",
                hint=REBUILD,
            )
        sizes = [(group.window, group.layers, group.tokens_per_block) for group in plan.caches]
        if sizes != [(group.window, group.layers, group.tokens_per_block) for group in plans[0].caches]:
            raise EngineError(
                "the rank files of the engine do not belong together", where=f"rank {rank}: caches", hint=REBUILD
            )
