"""A pipeline stage's share of a program (`--pp_size`): neighbouring steps, whose weights and cache take about as many
bytes as those of every other stage.

    stage 0   embedding ─ layers.0 ─ layers.1 ─ send(hidden)
    stage 1   recv(hidden) ─ layers.2 ─ layers.3 ─ norm ─ lm_head ▶ logits

What a stage makes of weights and of the step's inputs alone, such as tables of rotations, each stage that reads it
makes for itself. All else that later stages read travels, through the stages between them if need be. The steps of a
layer's cache are never parted: a layer that reads the keys of an earlier one lies in the same stage.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

from ingot.builder.lower import Lowering
from ingot.builder.pack import WeightUse
from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.builder.select import choose_kernel
from ingot.configs.ranks import too_many_stages
from ingot.dtypes import DType
from ingot.plan import Attr, CacheGroup, Rows
from ingot.plugins.op import Op
from ingot.plugins.ops import recv, send
from ingot.plugins.registry import find_op
from ingot.plugins.target import Target

NAME = "cut_stages"
OPTION = "--pp_size"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CutStages:
    """What one stage has of a program that stages divide at `cuts`, see `find_cuts`.

    layers  gets the layers whose cache the stage has: there they are numbered in this order, from 0 on
    """

    lowering: Lowering
    target: Target
    stage: int
    cuts: Sequence[int]
    layers: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """The steps of the stage, between what it gets and what it passes on."""
        view, bounds = _View(program), (0, *self.cuts, len(program.steps))
        begin, end = bounds[self.stage], bounds[self.stage + 1]
        own = [step for step in program.steps[begin:end] if step.name not in view.repeated]
        self.layers[:] = sorted({int(step.attrs["layer"]) for step in own if "layer" in step.attrs})
        got = view.crossing(begin) if begin else []
        left = view.crossing(end) if end < len(program.steps) else []
        steps = [
            *(self._draft(recv.OP, i, (), (value,), program.values[value].cols) for i, value in enumerate(got)),
            *view.remade(own),
            *(self._numbered(step) for step in own),
            *(self._draft(send.OP, i, (value,), ()) for i, value in enumerate(left)),
        ]
        read = {ref for step in steps for ref in step.inputs if isinstance(ref, str)}
        self.lowering.drop_weights({use.name for use in self.lowering.uses} - read)
        made = _compacted(steps, program, last=end == len(program.steps))
        return made, PassReport(name=NAME, fired=len(got) + len(left))

    def caches(self, whole: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
        """The cache groups of the program, with the layers that the stage has of them."""
        found = []
        for group in whole:
            kept = [place for place, layer in enumerate(group.layers) if layer in self.layers]
            layers = tuple(self.layers.index(group.layers[place]) for place in kept)
            state = tuple(group.state[place] for place in kept) if group.state else ()
            found.append(dataclasses.replace(group, layers=layers, state=state))
        return tuple(found)

    def _draft(
        self, op: Op, message: int, inputs: tuple[int, ...], outputs: tuple[int, ...], columns: int | None = None
    ) -> Draft:
        attrs: dict[str, Attr] = {"stage": self.stage, "stages": len(self.cuts) + 1, "message": message}
        if columns is not None:
            attrs["columns"] = columns
        kernel = choose_kernel(self.target, op.name, "f32")
        name = f"stage{self.stage}.{op.name}{message}"
        return Draft(name=name, op=op.name, kernel=kernel, inputs=inputs, outputs=outputs, attrs=attrs)

    def _numbered(self, step: Draft) -> Draft:
        if "layer" not in step.attrs:
            return step
        return dataclasses.replace(step, attrs={**step.attrs, "layer": self.layers.index(int(step.attrs["layer"]))})


def find_cuts(
    program: Program, uses: Sequence[WeightUse], caches: Sequence[CacheGroup], tokens: int, stages: int
) -> tuple[int, ...]:
    """Where stages end: the index of the step behind each but the last. No layer's steps are parted, little is taken
    along, and the largest stage has as few bytes as then can be. tokens: whose keys and values count beside weights.

    Raises UsageError where the model cannot be cut so often.
    """
    places = [0, *_View(program).places(), len(program.steps)]
    held = _held(program, {use.name: use.nbytes for use in uses}, caches, tokens, places)

    @functools.cache
    def best(at: int, left: int) -> tuple[int, tuple[int, ...]] | None:
        """Bytes of the largest of `left` stages that have the steps from place `at` on, and where the others end."""
        if left == 1:
            rest = held.get((at, len(places) - 1))
            return None if rest is None else (rest, ())
        found: tuple[int, tuple[int, ...]] | None = None
        for to in range(at + 1, len(places) - 1):
            first, further = held.get((at, to)), best(to, left - 1)
            if first is not None and further is not None and (found is None or max(first, further[0]) < found[0]):
                found = max(first, further[0]), (places[to], *further[1])
        return found

    cuts = best(0, stages)
    if cuts is None:
        most = next((fewer for fewer in range(stages - 1, 1, -1) if best(0, fewer) is not None), 1)
        kinds = " + ".join(str(len(group.layers)) for group in caches)
        raise too_many_stages(OPTION, stages, most, kinds)
    return cuts[1]


def _held(
    program: Program, weights: Mapping[str, int], caches: Sequence[CacheGroup], tokens: int, places: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Bytes of the steps between each two places where these have a layer of every cache group."""
    group_of = {layer: number for number, group in enumerate(caches) for layer in group.layers}
    found: dict[tuple[int, int], int] = {}
    for first in range(len(places) - 1):
        seen, layers, total = set[str](), set[int](), 0
        for last in range(first + 1, len(places)):
            for step in program.steps[places[last - 1] : places[last]]:
                for name in {ref for ref in step.inputs if isinstance(ref, str)} - seen:
                    total += weights.get(name, 0)
                    seen.add(name)
                layer = step.attrs.get("layer")
                if isinstance(layer, int) and layer not in layers:
                    group = caches[group_of[layer]]
                    total += group.block_bytes // len(group.layers) * group.blocks_of(tokens)
                    layers.add(layer)
            if len({group_of[layer] for layer in layers}) == len(caches):
                found[first, last] = total
    return found


class _View:
    """Which step of a program makes and reads which value.

    repeated  names of steps that make what they do of weights and of the step's inputs alone, without a table
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._writer: dict[int, int] = {}
        self._last: dict[int, int] = {}  # value → the last step that reads it
        self.repeated: set[str] = set()
        remade: set[int] = set()
        for i, step in enumerate(program.steps):
            op, read = find_op(step.op), {ref for ref in step.inputs if isinstance(ref, int)}
            self._writer.update({value: i for value in step.outputs if value is not None})
            self._last.update(dict.fromkeys(read, i))
            if read <= remade and not (op.tables or op.uses_kv or op.state or op.packed is not None):
                self.repeated.add(step.name)
                remade.update(value for value in step.outputs if value is not None)

    def crossing(self, at: int) -> list[int]:
        """Values that steps before `at` have made for those from there on, in the order of their steps."""
        steps = self._program.steps
        return [
            value
            for value, i in self._writer.items()
            if i < at <= self._last.get(value, -1) and steps[i].name not in self.repeated
        ]

    def remade(self, own: Sequence[Draft]) -> list[Draft]:
        """Repeated steps that make what a stage's own steps read, in order."""
        wanted = {ref for step in own for ref in step.inputs if isinstance(ref, int)}
        found = []
        for step in reversed(self._program.steps):
            if step.name in self.repeated and not wanted.isdisjoint(step.outputs):
                found.append(step)
                wanted.update(ref for ref in step.inputs if isinstance(ref, int))
        return found[::-1]

    def places(self) -> list[int]:
        """Where a stage may begin: between the steps of two layers' caches, where the fewest columns cross there, or as
        few as at the widest of these places."""
        steps, values = self._program.steps, self._program.values
        layers: dict[int, list[int]] = {}
        for i, step in enumerate(steps):
            if isinstance(layer := step.attrs.get("layer"), int):
                layers.setdefault(layer, []).append(i)
        widths: dict[int, int] = {}
        first, last = (min(map(min, layers.values())), max(map(max, layers.values()))) if layers else (0, 0)
        for at in range(first + 1, last + 1):
            crossing = self.crossing(at)
            if any(own[0] < at <= own[-1] for own in layers.values()) or len(crossing) > send.MOST_MESSAGES:
                continue
            if all(values[each].rows is Rows.TOKENS and values[each].dtype is DType.F32 for each in crossing):
                widths[at] = sum(values[each].cols for each in crossing)
        runs = [
            [at for _, at in run] for _, run in itertools.groupby(enumerate(widths), lambda pair: pair[1] - pair[0])
        ]
        most = max((min(widths[at] for at in run) for run in runs), default=0)
        return [at for at, width in widths.items() if width <= most]


def _compacted(steps: Sequence[Draft], program: Program, *, last: bool) -> Program:
    """A program of these steps, without the values of others. last: it makes the logits."""
    used = dict.fromkeys(
        ref for step in steps for ref in (*step.inputs, *step.outputs) if isinstance(ref, int) and ref is not None
    )
    number = {value: i for i, value in enumerate(used)}

    def renumbered(step: Draft) -> Draft:
        inputs = tuple(number[ref] if isinstance(ref, int) else ref for ref in step.inputs)
        outputs = tuple(None if value is None else number[value] for value in step.outputs)
        return dataclasses.replace(step, inputs=inputs, outputs=outputs)

    return dataclasses.replace(
        program,
        steps=tuple(map(renumbered, steps)),
        values=tuple(program.values[value] for value in used),
        logits=number[program.logits] if last and program.logits is not None else None,
    )
