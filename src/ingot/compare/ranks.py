"""The ranks of an engine as a comparison goes through them, and the plan that their pipeline stages make together.

rank 2, 3   stage 0   embedding ─ layers.0 ─ send     ranks of a stage divide each layer: the first one's plan is
rank 0, 1   stage 1   recv ─ layers.1 ─ lm_head       that of a source for such a rank, cut into stages
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from ingot.builder.source import Source
from ingot.compare.packed import PackedWeights
from ingot.engine import Engine
from ingot.plan import Buffer, CacheGroup, Plan, Step
from ingot.plugins.registry import find_op


class Rank:
    """source: as a rank of this place has it, whole and in one stage."""

    def __init__(self, engine: Engine, number: int, source: Source) -> None:
        self.engine, self.number, self.source = engine, number, source
        self.plan, self.packed = engine.plan, PackedWeights(engine.plan, engine.weights)

    def what(self, words: str) -> str:
        """Words about this rank, for errors."""
        return f"rank {self.number}: {words}" if self.engine.manifest.ranks > 1 else words


def in_stages(plans: Sequence[Plan]) -> list[list[int]]:
    """Numbers of the ranks of each pipeline stage, in the order of the stages: the last one's come first."""
    each = len(plans) // plans[0].stage[1]
    return [list(range(first, first + each)) for first in range(len(plans) - each, -1, -each)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The plans of all pipeline stages as one, without what stages send each other.

    steps  of each stage, for each step of its plan: that of the joined plan, or None where it only passes rows on, or
           does what an earlier stage has done
    """

    plan: Plan
    steps: tuple[tuple[Step | None, ...], ...]


def join_stages(plans: Sequence[Plan], source: Plan | None = None) -> Joined:
    """plans: of ranks with the same place in each stage, in the order of the stages. source: numbers the layers, which
    each stage numbers anew, in their order."""
    if len(plans) == 1:
        return Joined(plan=plans[0], steps=(plans[0].steps,))
    layers = [_layers(plan, source) for plan in plans]
    names = _Names(plans)
    made = [tuple(names.step(stage, step, layers[stage]) for step in plan.steps) for stage, plan in enumerate(plans)]
    last = plans[-1]
    joined = dataclasses.replace(
        last,
        caches=tuple(_whole(groups, layers) for groups in zip(*(plan.caches for plan in plans), strict=True)),
        inputs=tuple({each.name: each for plan in plans for each in plan.inputs}.values()),
        buffers=tuple(names.buffers.values()),
        weights=tuple({weight.name: weight for plan in plans for weight in plan.weights}.values()),
        steps=tuple(step for steps in made for step in steps if step is not None),
        logits=names.of(len(plans) - 1, last.logits),
    )
    return Joined(plan=joined, steps=tuple(made))


class _Names:
    """Buffers of the joined plan: each stage has its own, but a value that it gets keeps the name of where it was made.

    repeated  steps that several stages take: what they make has a name of its own
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.buffers: dict[str, Buffer] = {}
        count = Counter(step.name for plan in plans for step in plan.steps)
        self._repeated = {name for name, times in count.items() if times > 1}
        self._own = [{buffer.name: buffer for buffer in plan.buffers} for plan in plans]
        self._now: dict[tuple[int, str], str] = {}  # (stage, buffer) → where its value lies in the joined plan
        self._sent: dict[int, str] = {}  # message of the stage before → the same
        self._seen: set[str] = set()

    def of(self, stage: int, buffer: str) -> str:
        """Weights and inputs of the batch keep their names."""
        return self._now.get((stage, buffer), buffer)

    def step(self, stage: int, step: Step, layers: Sequence[int]) -> Step | None:
        """The joined plan's, to be called in the order of the steps. layers: numbers of the stage's layers."""
        if find_op(step.op).transfer is not None:
            message = int(step.attrs["message"])
            if step.outputs:
                self._now[stage, step.outputs[0]] = self._sent[message]
            else:
                self._sent[message] = self.of(stage, step.inputs[0])
            return None
        inputs = tuple(self.of(stage, name) for name in step.inputs)
        outputs = tuple(name and self._made(stage, step, i, name) for i, name in enumerate(step.outputs))
        if step.name in self._seen:
            return None
        self._seen.add(step.name)
        return dataclasses.replace(step, inputs=inputs, outputs=outputs, attrs={**step.attrs, **_layer(step, layers)})

    def _made(self, stage: int, step: Step, output: int, buffer: str) -> str:
        name = f"{step.name}.{output}" if step.name in self._repeated else f"stage{stage}.{buffer}"
        self.buffers[name] = dataclasses.replace(self._own[stage][buffer], name=name)
        self._now[stage, buffer] = name
        return name


def _layers(plan: Plan, source: Plan | None) -> list[int]:
    """Numbers of a stage's layers in the source, by their numbers in the stage."""
    if source is None:
        return []
    own = {step.name for step in plan.steps}
    return sorted({int(step.attrs["layer"]) for step in source.steps if step.name in own and "layer" in step.attrs})


def _layer(step: Step, layers: Sequence[int]) -> dict[str, int]:
    """The attribute of a step of a layer."""
    if "layer" not in step.attrs:
        return {}
    number = int(step.attrs["layer"])
    return {"layer": layers[number] if number < len(layers) else number}


def _whole(groups: Sequence[CacheGroup], layers: Sequence[Sequence[int]]) -> CacheGroup:
    """A cache group with the layers of all stages."""
    numbered = [
        (numbers[layer] if layer < len(numbers) else layer, size)
        for group, numbers in zip(groups, layers, strict=True)
        for layer, size in itertools.zip_longest(group.layers, group.state)
    ]
    return dataclasses.replace(
        groups[0],
        layers=tuple(number for number, _ in numbered),
        state=tuple(size for _, size in numbered if size is not None),
    )
