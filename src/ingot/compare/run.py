"""Goes through the steps of an engine and compares everything with the source: weights, kernels, the model's values.

A session without taps shows its logits alone: these are held to the bound that they have anyhow, after all weights.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ingot.builder.source import Source
from ingot.compare.derived import wrong_row
from ingot.compare.logit_metrics import LogitMeter
from ingot.compare.ops import KV_ROUNDING, KvPools, OutputError, StepChecker, rounded
from ingot.compare.packed import PackedWeights
from ingot.compare.report import COMPARED, LOGITS, Comparison, Finding, StepFigures
from ingot.compare.taps import PlainRun, TappedRun
from ingot.compare.tokens import Tokens
from ingot.compare.walk import LogitWalk, StepWalk, TensorError, relative
from ingot.compare.weights import WeightError, place, weight_error
from ingot.dtypes import DType
from ingot.engine import Engine
from ingot.plan import Step
from ingot.plugins.op import Array
from ingot.plugins.quantised import round_to_int8
from ingot.plugins.registry import find_op
from ingot.step_io import Int32, Session, TapSession

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
    """Goes through the steps for one group of sequences after the other."""

    def __init__(
        self, *, engine: Engine, source: Source, session: Session, progress: Progress, tokens: Tokens, threads: int
    ) -> None:
        self._engine, self._source, self._session, self._progress = engine, source, session, progress
        self._plan, self._threads = engine.plan, threads
        self._packed = PackedWeights(engine.plan, engine.weights)
        self._tokens, self._meter = tokens, LogitMeter(is_text=tokens.is_text)
        self._work = {step.name: self._numbers(step) for step in self._plan.steps}
        self._worst = {step.name: Worst() for step in self._plan.steps}
        self._errors: dict[str, WeightError] = {}
        self._derived: set[str] = set()  # steps
        self._findings: dict[str, dict[str, Finding]] = {name: {} for name in (*self._work, LOGITS)}

    def compare_group(self, begin: int, sequences: Int32) -> None:
        """All steps, for sequences that fit into memory together."""
        with np.errstate(all="ignore"):  # NaN and infinities of a source are compared like numbers
            if isinstance(self._session, TapSession):
                self._compare_steps(TappedRun(self._session, self._plan, sequences), begin, sequences)
            else:
                self._compare_logits(PlainRun(self._session, self._plan, sequences).logits(), begin, sequences)

    def _compare_steps(self, run: TappedRun, begin: int, sequences: Int32) -> None:
        checker = StepChecker(self._packed, self._plan, run.batch, self._threads)
        walk = StepWalk(self._source, self._plan, sequences, self._threads, run.routes())
        live: dict[str, Array] = {}
        for step, (_, outputs) in zip(self._plan.steps, run.steps(), strict=True):
            self._check_weights(step)
            inputs = {name: live[name] for name in step.inputs if name in live}
            self._check_kernel(step, checker.check(step, inputs, outputs, _pools(run, step)))
            live.update(outputs)
            rounding = self._rounding(step, inputs)
            if (dtype := checker.stored_type(step)) is not DType.F32:  # what a product would round otherwise
                moved = outputs[step.outputs[0]] * OFF_GRID
                rounding = float(np.hypot(rounding, relative(rounded(moved, dtype), moved)))
            for error in walk.compare(step, outputs, rounding):
                self._check_model(step, error)
                if error.tensor == self._source.logits:
                    self._meter.add(sequences, outputs[error.buffer], error.own)
            self._progress_by(step, begin, sequences, "comparing kernel calls")
        self._check_variants(run, live[self._plan.logits])

    def _check_variants(self, run: TappedRun, logits: Array) -> None:
        """The steps were looked at one by one: the calls that run in service must give the same bits."""
        if not self._plan.variants:
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

    def _compare_logits(self, logits: Array, begin: int, sequences: Int32) -> None:
        """What the engine's buffers held is unknown: its roundings are measured on the source's own values."""
        walk = LogitWalk(self._source, self._plan, sequences, self._threads)
        for step in self._plan.steps:
            self._check_weights(step)
            inputs = {name: walk.live[name].astype(np.float32) for name in step.inputs if name in walk.live}
            bound = walk.follow(step, self._rounding(step, inputs))
            worst = self._worst[step.name]
            worst.bound = max(worst.bound, bound)
            self._progress_by(step, begin, sequences, "comparing weights")
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
                name=step.name,
                kernel=step.kernel,
                weight_error=worst.weight,
                kernel_error=worst.kernel,
                model_error=worst.model,
                model_bound=worst.bound,
            )
            for step, worst in ((step, self._worst[step.name]) for step in self._plan.steps)
        )
        target = self._engine.manifest.target
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
            layers=COMPARED if isinstance(self._session, TapSession) else f"not compared: {target} has no taps",
        )

    def _numbers(self, step: Step) -> int:
        """How much there is to compute with: time follows the weights, if there are many."""
        return 1 + sum(
            math.prod(self._packed.weights[name].shape) for name in step.inputs if name in self._packed.weights
        )

    def _check_weights(self, step: Step) -> None:
        """Once per weight; a later step that shares it reports it again."""
        op = find_op(step.op)
        self._check_derived(step)
        for index, name in enumerate(step.inputs):
            if name not in self._packed.weights or index in op.derived or index in op.constants:
                continue
            if name not in self._errors:
                self._errors[name] = weight_error(name, self._packed, self._source, self._threads)
            error = self._errors[name]
            worst = self._worst[step.name]
            worst.weight = max(worst.weight, error.relative)
            if error.worst is not None:
                value = error.worst
                many = f" ({error.wrong_values:,} values in {error.wrong_rows:,} rows are wrong)"
                self._find(
                    step.name,
                    "weight",
                    f"weight {name}, {place(self._plan, step, name, value.row, value.col)}",
                    f"{value.expected:.7g} within {value.bound:.2g}: the source's value in this precision",
                    f"{value.got:.7g}{many if error.wrong_values > 1 else ''}",
                )

    def _check_derived(self, step: Step) -> None:
        """Once: what these weights give is not compared, since the reference of their op does not read them."""
        if step.name in self._derived:
            return
        self._derived.add(step.name)
        wrong = wrong_row(step, self._packed, self._threads)
        if wrong is not None:
            self._find(
                step.name,
                "derived",
                f"weight {wrong.weight}, row {wrong.row}",
                "what is made of the same row of the product's weight",
                "other integers or another scale",
            )

    def _check_kernel(self, step: Step, error: OutputError) -> None:
        worst = self._worst[step.name]
        worst.kernel = max(worst.kernel or 0.0, error.ratio)
        if error.ratio > 1:
            self._find(
                step.name,
                "kernel",
                f"{error.what} of kernel {step.kernel}, {error.place}",
                f"{error.expected:.7g} within {error.bound:.2g}: the op's reference on the same inputs",
                f"{error.got:.7g}",
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

    def _rounding(self, step: Step, inputs: Mapping[str, Array]) -> float:
        """Relative error that the precision of this step brings: of its weights, inputs and keys and values."""
        errors = [UNSEEN, self._worst[step.name].weight]
        if find_op(step.op).writes_kv:
            errors.append(KV_ROUNDING[self._plan.caches[0].dtype])
        activations = step.attrs.get("activations")
        if activations in ("bf16", "f16"):
            x = inputs[step.inputs[0]]
            errors.append(relative(rounded(x, DType(activations)), x, where_both=True))
        if activations == "int8":
            x = inputs[step.inputs[0]]
            codes, scale = round_to_int8(x)
            errors.append(relative(codes * scale[:, None], x, where_both=True))
        return float(np.sqrt(sum(error**2 for error in errors)))

    def _progress_by(self, step: Step, begin: int, sequences: Int32, what: str) -> None:
        """A step is done for a group of sequences from number `begin`."""
        if step is self._plan.steps[0]:
            self._done = sum(self._work.values()) * begin
        self._done += self._work[step.name] * len(sequences)
        self._progress(what, self._done, sum(self._work.values()) * len(self._tokens.sequences))

    def _find(self, step: str, kind: str, what: str, expected: str, got: str) -> None:
        """The first finding of each kind stands for the step."""
        self._findings[step].setdefault(kind, Finding(step=step, what=what, expected=expected, got=got))

    def _notes(self) -> tuple[str, ...]:
        mine, theirs = self._engine.manifest.sources, self._source.hashes
        other = sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])
        if not other:
            return ()
        return (f"The engine was built from other files than this source: {', '.join(other)} differ in SHA-256.",)


def _off(error: float) -> str:
    """A relative error, in words."""
    return f"{error:.2e} off" if np.isfinite(error) else "NaN or infinities at other places"


def _pools(run: TappedRun, step: Step) -> KvPools | None:
    if not find_op(step.op).uses_kv:
        return None
    keys, values = run.kv(int(step.attrs["layer"]))
    return KvPools(keys=keys, values=values)
