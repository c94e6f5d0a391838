"""What a comparison found: every step, the first one beyond its tolerance, and figures for people and programs."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.errors import EngineError
from ingot.manifest import Fact

COMPARED = "compared"
LOGITS = "logits"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something beyond its tolerance. what: which weight or output of the step, and where in it. step: LOGITS where
    nothing else of what the engine computed could be looked at."""

    step: str
    what: str
    expected: str
    got: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """One step.

    weight_error   largest relative difference of a weight from the source's, root mean square
    kernel_error   largest difference of an output from the op's reference on the same inputs, in parts of the bound;
                   None where the session has no taps
    model_error    relative difference of an output from what the source makes of the engine's values before, root mean
                   square; None where the source's graph has no such value. For a session without taps: the
                   difference of the logits alone, from those of the source
    model_bound    what the roundings since the values before explain
    """

    name: str
    kernel: str
    weight_error: float
    kernel_error: float | None
    model_error: float | None
    model_bound: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogitMetrics:
    """KL divergence of the engine's next-token distributions from the source's, in nats; perplexities are of the text,
    None where token ids were drawn at random. positions: those that count; left_out: those with NaN or infinities among
    their logits. Figures are None where no position counts."""

    positions: int
    left_out: int
    kl_mean: float | None
    kl_max: float | None
    top1_agreement: float | None
    perplexity: float | None
    source_perplexity: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """notes: e.g. that the engine names other source files. findings: in the order of the steps. target: which one of
    the engine's. layers: COMPARED, or why not, in words."""

    engine: Path
    target: str
    source: Path
    text: str
    layers: str
    steps: tuple[StepFigures, ...]
    findings: tuple[Finding, ...]
    logits: LogitMetrics
    notes: tuple[str, ...]

    @property
    def worst_step(self) -> StepFigures:
        """The step whose output is farthest from the source's."""
        return max(self.steps, key=lambda step: step.model_error or 0.0)

    def raise_if_wrong(self) -> None:
        """Raise EngineError for the first step beyond its tolerance."""
        if not self.findings:
            return
        first, steps = self.findings[0], list(dict.fromkeys(finding.step for finding in self.findings))
        later = len(steps) - 1
        which = f"the first kernel call beyond its tolerance is {first.step}"
        if first.step == LOGITS:
            which = f"its logits are beyond their tolerance (layers {self.layers})"
        others = ""
        if later:
            those = (
                "1 later kernel call is beyond its" if later == 1 else f"{later} later kernel calls are beyond their"
            )
            others = f"; {those} tolerance, too"
        raise EngineError(
            f"the engine does not compute what its source says: {which}",
            where=f"{self.engine}, {self.target}: {first.what}",
            expected=first.expected,
            got=first.got + others,
            hint=" ".join([*self.notes, "build the engine again; if it stays so, this is a bug of ingot"]),
        )

    def results(self) -> dict[str, Fact]:
        """What an engine keeps of a comparison."""
        return {
            "text": self.text,
            **dataclasses.asdict(self.logits),
            "worst_step": self.worst_step.name,
            "worst_error": self.worst_step.model_error,
            "layers": self.layers,
        }

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "engine": str(self.engine),
            "target": self.target,
            "source": str(self.source),
            "ok": not self.findings,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "summary": _finite(self.results()),
            "steps": [_finite(dataclasses.asdict(step)) for step in self.steps],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """One screen."""
        weight = max(self.steps, key=lambda step: step.weight_error)
        worst = self.worst_step
        if self.layers == COMPARED:
            kernel = max(self.steps, key=lambda step: step.kernel_error or 0.0)
            outputs = [
                f"kernels     {kernel.name} uses most of its tolerance: {kernel.kernel_error or 0:.0%}",
                f"layers      {worst.name} differs most from the source: {_share(worst.model_error or 0)}, "
                f"tolerance {_share(worst.model_bound)}",
            ]
        else:
            outputs = [
                f"layers      {self.layers}",
                f"logits      {_share(worst.model_error or 0)} from the source, tolerance {_share(worst.model_bound)}",
            ]
        tokens = self.logits.positions + self.logits.left_out
        return [
            f"{self.engine} for {self.target} against {self.source}",
            f"compared    {len(self.steps)} kernel calls, on {tokens} tokens of {self.text}",
            f"weights     {weight.name} differs most from the source: {_share(weight.weight_error)}",
            *outputs,
            *result_lines(self.results()),
        ]


def result_lines(results: Mapping[str, Fact]) -> list[str]:
    """Its figures, for people."""
    if not results["positions"]:
        return ["KL          unknown: every position has NaN or infinities among its logits"]
    lines = [
        f"KL          mean {results['kl_mean']:.2e}, at most {results['kl_max']:.2e} nats",
        f"top-1       {results['top1_agreement']:.2%} of {results['positions']} positions agree",
    ]
    if results.get("left_out"):
        lines.append(f"left out    {results['left_out']} positions with NaN or infinities among their logits")
    if results["perplexity"] is not None:
        lines.append(f"perplexity  {results['perplexity']:.4f}, of the source {results['source_perplexity']:.4f}")
    return lines


def _share(value: float) -> str:
    return f"{value:.2%}" if value >= 1e-3 else f"{value:.1e}"


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is not a number: null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
