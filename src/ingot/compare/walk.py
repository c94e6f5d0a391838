"""The source's own graph beside an engine, tensor by tensor: what it makes of what the engine had just before.

Layers amplify: where attention is sharp, or two experts are nearly as good, roundings of the first layer change the
last one beyond recognition. So no error is followed through the model. After each comparison the source goes on with
the engine's value, and it takes the experts that the engine took. How far roundings lead between two comparisons is
measured: noise of their size goes the same way. All of that is computed at once, which reads each weight once.

    own     by itself
    after   with the engine's values and experts
    moved   as `after`, with noise as large as the engine's roundings since; keys and values rounded as by an int8 cache
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.builder.evaluate import Evaluation, Float64
from ingot.builder.source import Source
from ingot.compare.places import are_numbers, vanish
from ingot.compare.taps import Outputs
from ingot.plan import Plan, Step
from ingot.plugins.kv_codes import round_to_codes
from ingot.plugins.op import Array
from ingot.plugins.registry import find_op
from ingot.step_io import Int32

MARGIN = 3.0  # an error may be this many times as large as what noise of the roundings' size makes
NEAR_TIE = 1e-4  # of the shares of two experts: what the roundings of a softmax explain
MARGIN_UNSEEN = 6.0  # the same of a whole model that cannot be looked into
_BY_ITSELF = ""  # stands beside the tensors for the roundings alone, wherever they lead

Roots = Mapping[str, float]
"""tensor that a value is made of → squared relative error that roundings since have brought"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorError:
    """An output of a step beside the source's. error, bound: relative, root mean square; infinite where one has a
    number and the other has none. own: the source's value by itself."""

    buffer: str
    tensor: str
    error: float
    bound: float
    own: Float64


class _Walk:
    """Goes through the steps of a plan. copies: how many times the sequences are computed; attended: keys and values
    that are wanted, too."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        sequences: Int32,
        threads: int,
        copies: int,
        routes: Mapping[str, Array],
        attended: Collection[tuple[str, str]] = (),
    ) -> None:
        wanted = {name for names in (*source.tensors.values(), *attended) for name in names if name}
        ids = np.tile(sequences.astype(np.int64), (copies, 1))
        used = {name for step in plan.steps for name in step.inputs}
        experts = _experts(source, plan, sequences, routes)
        quantised = [each.name for each in plan.weights if each.name in used and each.dtype.is_quantised]
        self._values: Evaluation = source.evaluate(ids, wanted, threads, experts, quantised)
        self._tensors, self._count, self._copies = source.tensors, len(sequences), copies
        self._noise = np.random.default_rng(0)
        self._roots: dict[str, dict[str, float]] = {}  # by buffer

    def _roots_of(self, step: Step, rounding: float) -> dict[str, float]:
        """What a step's outputs are made of. Its own roundings count with its first input, where they are as large."""
        roles = find_op(step.op).inputs
        inputs = [
            self._roots[name]
            for name, role in zip(step.inputs, roles, strict=True)
            if name in self._roots and role != "ids"
        ]
        found: dict[str, float] = {_BY_ITSELF: 0.0}
        for roots in inputs:
            for tensor, squared in roots.items():
                found[tensor] = max(found.get(tensor, 0.0), squared)
        for tensor in {_BY_ITSELF, *(inputs[0] if inputs else ())}:
            found[tensor] += rounding**2
        return found

    def _named(self, step: Step) -> list[tuple[str, str]]:
        """(buffer, tensor) of the outputs that the source's graph has, too."""
        both = zip(step.outputs, self._tensors.get(step.name, ()), strict=False)
        return [(buffer, tensor) for buffer, tensor in both if buffer and tensor]

    def _split(self, tensor: str) -> list[Float64]:
        """The tensor in every copy, each [tokens, cols]."""
        value = self._values.value(tensor)
        rows = value.reshape(value.shape[0] * value.shape[1], -1)
        return np.split(rows, self._copies)

    def _noisy(self, values: npt.NDArray[np.floating], relative: float) -> Float64:
        """Noise of this size in every row, alike in all its columns as the error of a sum is."""
        numbers = np.where(np.isfinite(values), values, 0)
        size = np.sqrt(np.mean(np.square(numbers, dtype=np.float64), axis=1, keepdims=True))
        noisy: Float64 = values + relative * size * self._noise.standard_normal(values.shape)
        return noisy


class StepWalk(_Walk):
    """Beside an engine whose steps can be looked at. routes: of each step that chooses experts, their numbers."""

    def __init__(self, source: Source, plan: Plan, sequences: Int32, threads: int, routes: Mapping[str, Array]) -> None:
        self._plan = plan
        self._attended = source.attended if any(group.has_codes for group in plan.caches) else {}
        super().__init__(source, plan, sequences, threads, 3, routes, set(self._attended.values()))
        self._cached = set[str]()  # keys and values that are rounded
        attentions = [step.name for step in plan.steps if find_op(step.op).reads_kv]
        self.rounds_cache = bool(self._attended) and all(
            tensor in self._attended for name in attentions for tensor in source.tensors.get(name, ("",))
        )
        """Whether keys and values are rounded here, as a cache of codes does, rather than moved by noise"""
        self._engine: dict[str, Array] = {}  # tensor → the engine's value, of the roots

    def compare(self, step: Step, outputs: Outputs, rounding: float) -> Iterator[TensorError]:
        """To be called for every step, in order. rounding: what the step's precision brings, relative."""
        roots, named = self._roots_of(step, rounding), self._named(step)
        if named:
            for tensor in sorted(roots.keys() - {_BY_ITSELF}):  # noise is drawn in the same order every time
                self._go_on(tensor, roots[tensor])
        if find_op(step.op).routes:
            yield self._choice(step, roots)
        if find_op(step.op).reads_kv:
            for _, tensor in named:
                self._round_keys_and_values(step, tensor)
        copies = {tensor: self._split(tensor) for _, tensor in named}
        for buffer, tensor in named:
            yield self._error(step, buffer, tensor, outputs[buffer], copies[tensor], roots)
            self._engine[tensor] = outputs[buffer]
        for buffer in filter(None, step.outputs):
            self._roots[buffer] = roots
        for buffer, tensor in named:
            self._roots[buffer] = {tensor: 0.0, _BY_ITSELF: 0.0}
        used = {tensor for each in self._roots.values() for tensor in each}
        self._engine = {tensor: values for tensor, values in self._engine.items() if tensor in used}

    def _error(
        self, step: Step, buffer: str, tensor: str, engine: Array, copies: Sequence[Float64], roots: Roots
    ) -> TensorError:
        own, after, moved = copies
        lead = float(np.hypot(relative(moved, after, where_both=True), np.sqrt(roots[_BY_ITSELF])))
        nothing = vanish(step, engine, after)
        ours, reference = np.where(nothing, 0, engine), np.where(nothing, 0, after)
        error = relative(ours, reference, together=self._together(step))
        return TensorError(buffer=buffer, tensor=tensor, error=error, bound=MARGIN * lead, own=own)

    def _choice(self, step: Step, roots: Roots) -> TensorError:
        """Are the experts that the engine took the graph's own choice, from the same logits?"""
        (logits,) = roots.keys() - {_BY_ITSELF}
        self._go_on(logits, roots[logits])
        lost = self._values.choice(logits)
        _, after, _ = np.split(lost, self._copies)
        error = float(np.nan_to_num(after, nan=0.0).max())  # a token whose logits are NaN takes any
        return TensorError(buffer=step.outputs[0], tensor=logits, error=error, bound=NEAR_TIE, own=after)

    def _round_keys_and_values(self, step: Step, attention: str) -> None:
        """`moved` has them as an int8 cache has. Noise on what they are made of would say too little: keys often have a
        large part in common, so the scale of a code is large beside what the products make of the noise."""
        for name in self._attended.get(attention, ()):
            if name in self._cached:  # by an earlier layer, whose cache this one shares, or keys that are values
                continue
            self._cached.add(name)
            moved = np.split(self._values.value(name), self._copies)[-1]
            group = self._plan.caches[self._plan.group_of(int(step.attrs["layer"]))]
            codes, scales = round_to_codes(moved.reshape(-1, group.head_dim).astype(np.float32), group.dtype)
            with np.errstate(invalid="ignore"):  # NaN, where a row holds no numbers
                self._values.replace(name, (self._copies - 1) * self._count, codes * scales[:, None])

    def _together(self, step: Step) -> int:
        """How many columns are made of values with one scale: those of a head in a cache of codes."""
        if not find_op(step.op).reads_kv:
            return 1
        group = self._plan.caches[self._plan.group_of(int(step.attrs["layer"]))]
        return group.head_dim if group.has_codes else 1

    def _go_on(self, tensor: str, squared: float) -> None:
        """With the engine's value, and with noise on it."""
        values = self._engine[tensor].astype(np.float64)
        both = np.concatenate([values, self._noisy(values, float(np.sqrt(squared)))])
        self._values.replace(tensor, self._count, both)


class LogitWalk(_Walk):
    """Walks an engine that shows its logits alone: gives `own` and `moved`, with noise at every tensor."""

    def __init__(self, source: Source, plan: Plan, sequences: Int32, threads: int) -> None:
        super().__init__(source, plan, sequences, threads, 2, {})
        self.live: dict[str, Float64] = {}
        """buffer → what the source would have written into it so far"""

    def follow(self, step: Step, rounding: float) -> float:
        """To be called for every step, in order. Returns the bound of the step's outputs."""
        roots = self._roots_of(step, rounding)
        lead = 0.0
        for buffer in filter(None, step.outputs):
            self._roots[buffer] = roots
        for buffer, tensor in self._named(step):
            own, moved = self._split(tensor)
            moved = self._noisy(moved, float(np.sqrt(roots[_BY_ITSELF])))
            lead = max(lead, relative(moved, own, where_both=True))
            self._values.replace(tensor, self._count, moved)
            self._roots[buffer], self.live[buffer] = {_BY_ITSELF: 0.0}, own
        if find_op(step.op).copies_rows:  # of all rows: nothing changes, and the source has no such step
            self.live[step.outputs[0]] = self.live[step.inputs[0]]
        return MARGIN_UNSEEN * lead


def relative(
    got: npt.NDArray[np.floating], wanted: npt.NDArray[np.floating], *, where_both: bool = False, together: int = 1
) -> float:
    """Root mean square of the difference over that of `wanted`, where both are finite numbers. Infinite where only one
    of them is, unless `where_both` says that this does not matter. together: columns of which one that is not a finite
    number spoils the others."""
    here, there = are_numbers(got), are_numbers(wanted)
    both = here & there
    whole, wanted_whole = (np.all(each.reshape(len(each), -1, together), axis=2) for each in (here, there))
    if not where_both and not np.array_equal(whole, wanted_whole):
        return float("inf")
    difference = np.linalg.norm(np.where(both, got, 0).astype(np.float64) - np.where(both, wanted, 0))
    size = np.linalg.norm(np.where(both, wanted, 0).astype(np.float64))
    return float(difference / size) if size else float(difference > 0)


def _experts(
    source: Source, plan: Plan, sequences: Int32, routes: Mapping[str, Array]
) -> dict[str, npt.NDArray[np.int64]]:
    """The router's logits in the graph → experts for the copies `own`, `after` and `moved`."""
    found, written = dict[str, npt.NDArray[np.int64]](), dict[str, str]()
    for step in plan.steps:
        if step.name in routes:
            taken = routes[step.name].astype(np.int64).reshape(*sequences.shape, -1)
            found[written[step.inputs[0]]] = np.concatenate([np.full_like(taken, -1), taken, taken])
        written |= dict(zip(step.outputs, source.tensors.get(step.name, ()), strict=False))
    return found
