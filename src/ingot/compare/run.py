"""Goes through the steps of an engine and compares everything with the source: weights, kernels, the model's values.

A session without taps shows its logits alone: these are held to the bound that they have anyhow, after all weights.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ingot.compare.derived import wrong_row
from ingot.compare.logit_metrics import LogitMeter
from ingot.compare.ops import KV_ROUNDING, KvPools, OutputError, StepChecker, rounded, same_bits
from ingot.compare.ranks import Rank, in_stages, join_stages
from ingot.compare.report import COMPARED, LOGITS, Comparison, Finding, StepFigures
from ingot.compare.taps import Outputs, PlainRun, TappedRun
from ingot.compare.tokens import Tokens
from ingot.compare.walk import LogitWalk, StepWalk, TensorError, relative
from ingot.compare.weights import WeightError, factor_error, place, weight_error
from ingot.dtypes import DType
from ingot.plan import Attr, Step
from ingot.plugins.f8_rows import round_inputs
from ingot.plugins.op import Array
from ingot.plugins.quantised import round_to_int8
from ingot.plugins.registry import find_op
from ingot.step_io import Int32, RanksTapSession, Session, TapSession

OFF_GRID = np.float32(np.pi / 3)  # times this, numbers that are rounded already are so no more
UNSEEN = 1e-6  # rounding of every step that is not counted otherwise, relative

Progress = Callable[[str, int, int], None]
"""(what is being done, numbers looked at, numbers in all)"""


@dataclasses.dataclass(kw_only=True)
class Worst:
    """The largest errors of one step, over all groups, as in `StepFigures`."""

    weight: float = 0.0
    kernel: float | None = None
    model: float | None = None
    bound: float = 0.0


class Run:
    """Goes through the steps for one group of sequences after the other. ranks: all of the engine's, by number."""

    def __init__(
        self, *, ranks: Sequence[Rank], session: Session, progress: Progress, tokens: Tokens, threads: int
    ) -> None:
        self._ranks, self._session, self._progress, self._threads = ranks, session, progress, threads
        plans = [rank.plan for rank in ranks]
        self._stages = [[ranks[number] for number in numbers] for numbers in in_stages(plans)]
        self._firsts = [stage[0] for stage in self._stages]
        self._source = ranks[0].source
        self._joined = join_stages([rank.plan for rank in self._firsts], self._source.plan)
        self._plan = self._joined.plan
        self._tokens, self._meter = tokens, LogitMeter(is_text=tokens.is_text)
        self._steps = {
            step.name: step
            for stage in self._stages
            for steps in zip(*(rank.plan.steps for rank in stage), strict=True)
            for step in steps
        }
        self._work = Counter[str]()
        for rank in ranks:
            self._work.update({step.name: _numbers(rank, step) for step in rank.plan.steps})
        self._done, self._passed = 0, set[str]()  # numbers looked at; steps of this group
        self._worst = {name: Worst() for name in self._steps}
        self._errors: dict[tuple[int, str], WeightError] = {}  # by rank and weight
        self._factors: dict[tuple[int, str], float] = {}  # the same
        self._derived: set[tuple[int, str]] = set()  # ranks and steps
        self._findings: dict[str, dict[str, Finding]] = {name: {} for name in (*self._steps, LOGITS)}

    def compare_group(self, sequences: Int32) -> None:
        """All steps, for sequences that fit into memory together."""
        with np.errstate(all="ignore"):  # NaN and infinities of a source are compared like numbers
            if isinstance(self._session, TapSession | RanksTapSession):
                run = TappedRun(self._session, [rank.plan for rank in self._ranks], sequences)
                self._compare_steps(run, sequences)
            else:
                self._compare_logits(PlainRun(self._session, self._plan, sequences).logits(), sequences)

    def _compare_steps(self, run: TappedRun, sequences: Int32) -> None:
        checkers = [StepChecker(rank.packed, rank.plan, run.batch, self._threads) for rank in self._ranks]
        routes = run.routes([rank.number for rank in self._firsts])
        walk = StepWalk(self._source, self._plan, sequences, self._threads, routes)
        live: list[dict[str, Array]] = [{} for _ in self._ranks]
        sent: dict[tuple[int, Attr], Array] = {}  # to the next stage: by place among its ranks, and message
        for stage, joined in zip(self._stages, self._joined.steps, strict=True):
            for step, written, *steps in zip(
                joined, run.steps([rank.number for rank in stage]), *(rank.plan.steps for rank in stage), strict=True
            ):
                rounding = 0.0
                together = self._together(stage, steps, live, sent)
                for i, (rank, own, outputs) in enumerate(zip(stage, steps, written, strict=True)):
                    self._check_weights(rank, own)
                    inputs = {name: live[rank.number][name] for name in own.inputs if name in live[rank.number]}
                    checker = checkers[rank.number]
                    if find_op(own.op).lists:  # of the rows of another step
                        errors = []
                    elif together is not None:
                        errors = [same_bits("output", outputs[name], together[i]) for name in own.outputs]
                    else:
                        errors = [checker.check(own, inputs, outputs, _pools(run, rank, own))]
                    for error in errors:
                        self._check_kernel(rank, own, error)
                    live[rank.number].update(outputs)
                    rounding = max(rounding, self._rounding(rank, own, inputs, cache=not walk.rounds_cache))
                    if own.outputs and (dtype := checker.stored_type(own)) in (DType.BF16, DType.F16):
                        moved = outputs[own.outputs[0]] * OFF_GRID  # what a product would round otherwise
                        rounding = float(np.hypot(rounding, relative(rounded(moved, dtype), moved)))
                if step is not None:
                    self._check_alike(stage, steps, written)
                    named = {
                        name: written[0][old] for name, old in zip(step.outputs, steps[0].outputs, strict=True) if old
                    }
                    for found in walk.compare(step, named, rounding):
                        self._check_model(step, found)
                        if found.tensor == self._source.logits:
                            self._meter.add(sequences, named[found.buffer], found.own)
                self._progress_by(steps, sequences, "comparing kernel calls")
        self._check_variants(run, live[0][self._ranks[0].plan.logits])

    def _together(
        self,
        stage: Sequence[Rank],
        steps: Sequence[Step],
        live: Sequence[Mapping[str, Array]],
        sent: dict[tuple[int, Attr], Array],
    ) -> list[Array] | None:
        """What a step must give in each rank of a stage, if ranks or stages hand over what they have there; None of any
        other step. sent: gets what leaves the stage."""
        op = find_op(steps[0].op)
        if op.collective is None and op.transfer is None:
            return None
        brought = [live[rank.number][step.inputs[0]] for rank, step in zip(stage, steps, strict=True) if step.inputs]
        if op.collective is not None:
            return [op.collective(brought)] * len(stage)
        message = steps[0].attrs["message"]
        if op.outputs:
            return [sent.pop((place, message)) for place in range(len(stage))]
        sent.update({(place, message): values for place, values in enumerate(brought)})
        return []

    def _check_alike(self, stage: Sequence[Rank], steps: Sequence[Step], written: Sequence[Outputs]) -> None:
        """What is a tensor of the source is whole in every rank of a stage, and has the same bits there."""
        for output, tensor in enumerate(self._source.tensors.get(steps[0].name, ())):
            for rank, own, outputs in list(zip(stage, steps, written, strict=True))[1:] if tensor else ():
                wanted = written[0][steps[0].outputs[output]]
                error = same_bits("output", outputs[own.outputs[output]], wanted)
                if error.ratio:
                    self._find(
                        own.name,
                        "alike",
                        rank.what(f"output, {error.place}"),
                        f"{error.expected:.9g}: what rank {stage[0].number} has",
                        f"{error.got:.9g}",
                    )

    def _check_variants(self, run: TappedRun, logits: Array) -> None:
        """The steps were looked at one by one: the calls that run in service must give the same bits."""
        if not any(rank.plan.variants for rank in self._ranks):
            return
        found = run.logits()
        other = np.flatnonzero([not np.array_equal(*rows, equal_nan=True) for rows in zip(found, logits, strict=True)])
        if len(other):
            self._find(
                self._plan.steps[-1].name,
                "variants",
                f"logits of the plan's variants, token {other[0]}",
                "the bits that the kernel calls give one by one",
                f"others, at {len(other)} tokens",
            )

    def _compare_logits(self, logits: Array, sequences: Int32) -> None:
        """What the engine's buffers held is unknown: its roundings are measured on the source's own values."""
        walk = LogitWalk(self._source, self._plan, sequences, self._threads)
        for step in self._plan.steps:
            self._check_weights(self._ranks[0], step)
            inputs = {name: walk.live[name].astype(np.float32) for name in step.inputs if name in walk.live}
            bound = walk.follow(step, self._rounding(self._ranks[0], step, inputs, cache=True))
            worst = self._worst[step.name]
            worst.bound = max(worst.bound, bound)
            self._progress_by([step], sequences, "comparing weights")
        wanted, last = walk.live[self._plan.logits], self._worst[self._plan.steps[-1].name]
        error = relative(logits, wanted)
        last.model = max(last.model or 0.0, error)
        if not error <= bound:
            row = int(np.argmax(np.nan_to_num(np.linalg.norm(logits - wanted, axis=1), nan=np.inf)))
            self._find(
                LOGITS,
                "model",
                f"logits, farthest off at token {row}",
                f"at most {bound:.2e} off: what the roundings up to here explain",
                _off(error),
            )
        self._meter.add(sequences, logits, wanted)

    def result(self, directory: Path, against: Path) -> Comparison:
        """What was found in all groups."""
        steps = tuple(
            StepFigures(
                name=name,
                kernel=self._steps[name].kernel,
                weight_error=worst.weight,
                kernel_error=worst.kernel,
                model_error=worst.model,
                model_bound=worst.bound,
            )
            for name, worst in self._worst.items()
        )
        target = self._ranks[0].engine.manifest.target
        findings = tuple(finding for by_kind in self._findings.values() for finding in by_kind.values())
        return Comparison(
            engine=directory,
            target=target,
            source=against,
            text=self._tokens.origin,
            steps=steps,
            findings=findings,
            logits=self._meter.metrics(),
            notes=self._notes(),
            layers=COMPARED
            if isinstance(self._session, TapSession | RanksTapSession)
            else f"not compared: {target} has no taps",
        )

    def _check_weights(self, rank: Rank, step: Step) -> None:
        """Once per weight; a later step that shares it reports it again."""
        op = find_op(step.op)
        self._check_derived(rank, step)
        for index, name in enumerate(step.inputs):
            if name not in rank.packed.weights or index in op.derived or index in op.constants:
                continue
            key = rank.number, name
            if key not in self._errors:
                self._errors[key] = weight_error(name, rank.packed, rank.source, self._threads)
            error = self._errors[key]
            worst = self._worst[step.name]
            worst.weight = max(worst.weight, error.relative)
            if error.worst is not None:
                value = error.worst
                many = f" ({error.wrong_values:,} values in {error.wrong_rows:,} rows are wrong)"
                self._find(
                    step.name,
                    "weight",
                    rank.what(f"weight {name}, {place(rank.plan, step, name, value.row, value.col)}"),
                    f"{value.expected:.7g} within {value.bound:.2g}: the source's value in this precision",
                    f"{value.got:.7g}{many if error.wrong_values > 1 else ''}",
                )

    def _check_derived(self, rank: Rank, step: Step) -> None:
        """Once: what these weights give is not compared, since the reference of their op does not read them."""
        if (rank.number, step.name) in self._derived:
            return
        self._derived.add((rank.number, step.name))
        wrong = wrong_row(step, rank.packed, self._threads)
        if wrong is not None:
            self._find(
                step.name,
                "derived",
                rank.what(f"weight {wrong.weight}, row {wrong.row}"),
                "what is made of the same row of the product's weight",
                "other integers or another scale",
            )

    def _check_kernel(self, rank: Rank, step: Step, error: OutputError) -> None:
        worst = self._worst[step.name]
        worst.kernel = max(worst.kernel or 0.0, error.ratio)
        if error.ratio > 1:
            self._find(
                step.name,
                "kernel",
                rank.what(f"{error.what} of kernel {step.kernel}, {error.place}"),
                f"{error.expected:.9g} within {error.bound:.2g}: the op's reference on the same inputs",
                f"{error.got:.9g}",
            )

    def _check_model(self, step: Step, error: TensorError) -> None:
        worst = self._worst[step.name]
        worst.bound, worst.model = max(worst.bound, error.bound), max(worst.model or 0.0, error.error)
        if not error.error <= error.bound:
            self._find(
                step.name,
                "model",
                f"output {error.buffer} beside {error.tensor} of the source's graph",
                f"at most {error.bound:.2e} off: what the roundings since the last tensor explain",
                _off(error.error),
            )

    def _rounding(self, rank: Rank, step: Step, inputs: Mapping[str, Array], *, cache: bool) -> float:
        """Relative error that this step's precision brings: of weights, inputs and, if `cache`, keys and values."""
        errors = [UNSEEN, self._worst[step.name].weight]
        if cache and find_op(step.op).writes_kv:
            errors.append(KV_ROUNDING[self._plan.caches[0].dtype])
        activations = step.attrs.get("activations")
        if activations in ("bf16", "bf16_inputs", "f16"):
            x, to = inputs[step.inputs[0]], DType(str(activations).removesuffix("_inputs"))
            errors.append(relative(rounded(x, to), x, where_both=True))
            if activations != "bf16_inputs":
                errors.append(self._factor_error(rank, step, to))
        if activations == "int8":
            x = inputs[step.inputs[0]]
            codes, scale = round_to_int8(x)
            errors.append(relative(codes * scale[:, None], x, where_both=True))
        if (columns := _rounded_together(rank, step)) is not None:
            x, group = inputs[step.inputs[0]].reshape(-1, columns), int(step.attrs["group"])
            numbers, scale = round_inputs(x, group)
            errors.append(relative(numbers * np.repeat(scale, group or columns, 1)[:, :columns], x, where_both=True))
        return float(np.sqrt(sum(error**2 for error in errors)))

    def _factor_error(self, rank: Rank, step: Step, dtype: DType) -> float:
        """What matrix units take in place of a quantised weight; computed once."""
        packed = find_op(step.op).packed
        name = step.inputs[packed] if packed is not None else ""
        if name not in rank.packed.weights or not rank.packed.weights[name].dtype.is_quantised:
            return 0.0
        key = rank.number, name
        if key not in self._factors:
            self._factors[key] = factor_error(name, rank.packed, dtype, self._threads)
        return self._factors[key]

    def _progress_by(self, steps: Sequence[Step], sequences: Int32, what: str) -> None:
        """A step is done for a group of sequences; several stages may take it."""
        total = sum(self._work.values())
        for name in {step.name for step in steps} - self._passed:
            self._passed.add(name)
            self._done += self._work[name] * len(sequences)
        if len(self._passed) == len(self._work):
            self._passed.clear()
        self._progress(what, self._done, total * len(self._tokens.sequences))

    def _find(self, step: str, kind: str, what: str, expected: str, got: str) -> None:
        """The first finding of each kind stands for the step."""
        self._findings[step].setdefault(kind, Finding(step=step, what=what, expected=expected, got=got))

    def _notes(self) -> tuple[str, ...]:
        mine, theirs = self._ranks[0].engine.manifest.sources, self._source.hashes
        other = sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])
        if not other:
            return ()
        return (f"The engine was built from other files than this source: {', '.join(other)} differ in SHA-256.",)


def _off(error: float) -> str:
    """A relative error, in words."""
    return f"{error:.2e} off" if np.isfinite(error) else "NaN or infinities at other places"


def _rounded_together(rank: Rank, step: Step) -> int | None:
    """Columns that a step rounds to FP8 as one row, of its first input; None where it rounds nothing so."""
    op = find_op(step.op)
    if op.rounds and "group" in op.attrs:
        cols = next(each.cols for each in rank.plan.buffers if each.name == step.inputs[0])
        return cols // int(step.attrs.get("slots", 1))
    if op.packed is None or step.attrs["activations"] != "fp8" or op.attrs["activations"] == "fp8":
        return None
    return rank.packed.weights[step.inputs[op.packed]].shape[-1]


def _numbers(rank: Rank, step: Step) -> int:
    """How much there is to compute with: time follows the weights, if there are many."""
    weights = rank.packed.weights
    return 1 + sum(math.prod(weights[name].shape) for name in step.inputs if name in weights)


def _pools(run: TappedRun, rank: Rank, step: Step) -> KvPools | None:
    if not find_op(step.op).uses_kv:
        return None
    keys, values = run.kv(rank.number, int(step.attrs["layer"]))
    return KvPools(keys=keys, values=values)
