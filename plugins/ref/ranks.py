"""All ranks of an engine in one process: each step of every rank of a pipeline stage, then the next one; then the next
stage. So no rank waits for another one, and what they compute is what any arrangement of processes computes."""

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import REBUILD, EngineError
from ingot.plan import Attr, Plan, Step
from ingot.plugins.interpreter import Interpreter
from ingot.plugins.op import Array, make_cache
from ingot.plugins.rank_shares import RankShares
from ingot.plugins.ref.session import Arena, RefSession
from ingot.plugins.registry import find_op
from ingot.plugins.sequences import Sequences, step_result
from ingot.plugins.target import SessionOptions
from ingot.step_io import Ahead, Float32, Int32, SequenceRules, StepBatch, StepResult

_Tapped = dict[str, dict[str, Float32]]  # step → buffer → what it wrote


class RanksSession:
    """The first rank draws: all of them have the same logits."""

    most_steps = 1
    takes_drafts = True

    def __init__(
        self, plans: Sequence[Plan], weights: Sequence[npt.NDArray[np.uint8]], options: SessionOptions
    ) -> None:
        """Raises EngineError for plans that do not go together, CapacityError."""
        stages = _stages(plans)
        for first, own in stages:
            _require_alike(own, first)
        self._plans, self._stages = plans, [range(first, first + len(own)) for first, own in stages]
        self._shares = RankShares([plan.caches for plan in plans], len(stages))
        self._sequences = Sequences()
        self.num_blocks = options.num_blocks
        with contextlib.ExitStack() as opened:
            self._ranks = [
                opened.enter_context(
                    contextlib.closing(
                        RefSession(plan, own, options, ranks=len(plans) // len(stages), stages=len(stages))
                    )
                )
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
        return self._run(batch, [()] * len(self._ranks), [{} for _ in self._ranks])

    def run_ranks_tapped(
        self, batch: StepBatch, steps: Sequence[Sequence[str]]
    ) -> Sequence[Mapping[str, Mapping[str, Float32]]]:
        """See `RanksTapSession`."""
        tapped: list[_Tapped] = [{} for _ in self._ranks]
        self._run(batch, steps, tapped)
        return tapped

    def read_rank_kv(self, rank: int, layer: int, block: int) -> tuple[Float32, Float32]:
        """See `RanksTapSession`."""
        return self._ranks[rank].read_kv(layer, block)

    def _run(self, batch: StepBatch, wanted: Sequence[Sequence[str]], tapped: Sequence["_Tapped"]) -> StepResult:
        """tapped: gets what the steps that are named for each rank write."""
        batch = self._sequences.complete(batch)
        begun = [rank.begin(batch) for rank in self._ranks]
        sent: dict[tuple[int, Attr], Array] = {}  # to the next stage: by place among its ranks, and message
        for ranks in self._stages:
            own = [begun[rank] for rank in ranks]
            for steps in zip(*(self._plans[rank].steps for rank in ranks), strict=True):
                _compute(steps, own, sent)
                for rank, step, (_, arena) in zip(ranks, steps, own, strict=True):
                    if step.name in wanted[rank]:
                        tapped[rank][step.name] = {name: arena[name].copy() for name in step.outputs if name}
        return step_result(self._sequences, batch, begun[0][1][self._plans[0].logits])

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of the whole model."""
        return sum(part.nbytes for part in self._whole_arrays(group))

    def read_block(self, group: int, block: int, to: npt.NDArray[np.uint8]) -> None:
        """See `BlockSession`."""
        whole = self._whole_arrays(group)
        self._shares.join(group, self._parts(group, block)[:: self._shares.alike[group]], whole)
        to[...] = np.concatenate([part.ravel() for part in whole]).view(np.uint8)

    def write_block(self, group: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        """See `BlockSession`."""
        whole, offset = self._whole_arrays(group), 0
        for part in whole:
            part[...] = data[offset : offset + part.nbytes].view(np.float32).reshape(part.shape)
            offset += part.nbytes
        parts, alike = self._parts(group, block), self._shares.alike[group]
        for one in range(alike):
            self._shares.cut(group, whole, parts[one::alike])

    def _parts(self, group: int, block: int) -> list[tuple[Array, ...]]:
        return [rank.kv[group].parts(block) for rank in self._ranks]

    def _whole_arrays(self, group: int) -> tuple[Array, ...]:
        """Room for a block of the whole model."""
        return make_cache(self._shares.whole[group], 1).parts(0)

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Draw from given logits."""
        return self._sequences.draw(slots, logits, raw)

    def close(self) -> None:
        """Forget everything of every rank."""
        self._opened.close()


def _compute(
    steps: Sequence[Step], ranks: Sequence[tuple[Interpreter, Arena]], sent: dict[tuple[int, Attr], Array]
) -> None:
    """The same step of every rank of a stage. sent: what has left the stage before; gets what leaves this one."""
    op = find_op(steps[0].op)
    if op.collective is not None:
        together = op.collective([arena[step.inputs[0]] for step, (_, arena) in zip(steps, ranks, strict=True)])
        for step, (_, arena) in zip(steps, ranks, strict=True):
            arena.update({step.outputs[0]: together})
        return
    for place, (step, (interpreter, arena)) in enumerate(zip(steps, ranks, strict=True)):
        if op.transfer is None:
            arena.update(interpreter.compute(step, arena))
        elif op.inputs:
            sent[place, step.attrs["message"]] = op.transfer([arena[step.inputs[0]]])
        else:
            arena.update({step.outputs[0]: sent.pop((place, step.attrs["message"]))})


def _stages(plans: Sequence[Plan]) -> list[tuple[int, Sequence[Plan]]]:
    """First rank and plans of each pipeline stage, in the order of the stages: the last one's ranks come first. Raises
    EngineError where one is not in its place."""
    stages = plans[0].stage[1]
    each = len(plans) // stages
    for rank, plan in enumerate(plans):
        expected = stages - 1 - rank // max(each, 1), stages
        if plan.stage != expected or each * stages != len(plans):
            raise EngineError(
                "the rank files of the engine do not belong together",
                where=f"rank {rank}",
                expected=f"stage {expected[0]} of {expected[1]} of {len(plans)} ranks",
                got=f"stage {plan.stage[0]} of {plan.stage[1]}",
                hint=REBUILD,
            )
    return [(first, plans[first : first + each]) for first in range(len(plans) - each, -1, -each)]


def _require_alike(plans: Sequence[Plan], number: int) -> None:
    """Raises EngineError unless all ranks of a stage take the same steps and meet in the same collectives. number: of
    the first one."""

    def meets(step: Step) -> tuple[object, ...]:
        collective = find_op(step.op).collective is not None
        return (step.op, tuple(step.attrs.items()) if collective else ())

    first = [meets(step) for step in plans[0].steps]
    for rank, plan in enumerate(plans, number):
        if [meets(step) for step in plan.steps] != first or plan.limits != plans[0].limits:
            raise EngineError(
                "the rank files of the engine do not belong together",
                where=f"rank {rank}",
                expected=f"the steps and limits of rank {number}",
                hint=REBUILD,
            )
