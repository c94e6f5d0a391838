"""The steps of a plan for people: what each one runs, moves and computes for one token, and what bounds it."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from ingot.dtypes import Precision
from ingot.lost_codes import ranges
from ingot.plan import Plan, Step, Weight
from ingot.plugins.plan_work import PlanWork
from ingot.step_work import Load, Work

BALANCE = 8.0  # operations per byte, assumed: `ingot bench` measures what a machine really does
CONTEXT = 1024  # tokens an attention looks back at, where the limits allow


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """One step with one token: bytes of weights, cache and activations it moves; a multiply-add is two operations.

    activations  what a product rounds its input to; "" of other steps
    int8_error   relative error of the product with int8 inputs, as measured at build; None where it was not
    source       how the step's weight was quantised in the Checkpoint; "" where it was not
    weight_error what packing has changed of a quantised weight, relative; None where that was not measured
    tactics      how a product that was timed at build shares its work for 1, 2-8, 9-32 and more rows, a digit each
                 (0: as shipped); "" of other steps
    """

    name: str
    kernel: str
    precision: str
    activations: str
    int8_error: float | None
    source: str
    weight_error: float | None
    tactics: str
    nbytes: int
    operations: int
    bound: str


def step_info(
    plan: Plan,
    errors: Mapping[str, float | None] | None = None,
    context: int = CONTEXT,
    *,
    weight_errors: Mapping[str, float] | None = None,
    weight_sources: Mapping[str, str] | None = None,
) -> list[StepInfo]:
    """What every step is, for one token that sees `context` tokens, itself included. errors: of int8 inputs, by step;
    weight_errors, weight_sources: by weight."""
    work = PlanWork(plan)
    weights = {weight.name: weight for weight in plan.weights}
    lost, made_of = weight_errors or {}, weight_sources or {}
    load = Load(sequences=[(min(context, plan.limits.max_seq_len) - 1, 1)], logit_rows=1)
    return [
        dataclasses.replace(
            _info(step, work.of(step, load), weights, (errors or {}).get(step.name), plan.tactics.get(step.name, "")),
            source=next((made_of[name] for name in step.inputs if name in made_of), ""),
            weight_error=next((lost[name] for name in step.inputs if name in lost), None),
        )
        for step in plan.steps
    ]


def _info(step: Step, work: Work, weights: Mapping[str, Weight], error: float | None, tactics: str) -> StepInfo:
    products = [weights[name] for name in step.inputs if name in weights and "group" in step.attrs]
    precision = step.kernel.split(".")[1]
    if products:
        precision = str(Precision(dtype=products[0].dtype, group=int(step.attrs["group"])))
    return StepInfo(
        name=step.name,
        kernel=step.kernel,
        precision=precision,
        activations=str(step.attrs.get("activations", "")),
        int8_error=error,
        source="",
        weight_error=None,
        tactics=tactics,
        nbytes=work.nbytes,
        operations=work.operations,
        bound="compute" if work.operations > BALANCE * work.nbytes else "memory",
    )


_LAYER = re.compile(r"layers\.(\d+)/")
_Group = tuple[str, StepInfo, str, str]
"""(layers such as "0-3", or ""; the step without its layer; the int8 errors of its layers; those of its weights)"""


def _groups(steps: Sequence[StepInfo]) -> Iterator[_Group]:
    """Every step once; layers that do the same share one."""
    groups: dict[tuple[bool, StepInfo], list[tuple[int, StepInfo]]] = {}
    for each in steps:
        layer = _LAYER.match(each.name)
        name = each.name[layer.end() :] if layer else each.name
        same = (layer is not None, dataclasses.replace(each, name=name, int8_error=None, weight_error=None))
        groups.setdefault(same, []).append((int(layer[1]) if layer else -1, each))
    for (in_layer, step), members in groups.items():
        layers = ranges([layer for layer, _ in members]) if in_layer else ""
        rounding, packing = [each.int8_error for _, each in members], [each.weight_error for _, each in members]
        yield layers, step, _span(rounding), _span(packing)


def layer_words(names: Sequence[str]) -> list[str]:
    """Names of steps, those of several layers together: layers.0-3/qkv."""
    found: dict[str, list[int]] = {}
    for name in names:
        layer = _LAYER.match(name)
        found.setdefault(name[layer.end() :] if layer else name, []).extend([int(layer[1])] if layer else [])
    return [f"layers.{ranges(layers)}/{name}" if layers else name for name, layers in found.items()]


def whole_table(plan: Plan, steps: Sequence[StepInfo]) -> list[str]:
    """Everything that is known of the steps, as wide as it gets."""
    words = ("kernel call", "kernel", "source", "precision", "weight error", "activations", "int8 error", "tactics")
    rows = [(*words, "bytes", "operations", "bound")]
    for layers, step, error, lost in _groups(steps):
        label = f"layers.{layers}/{step.name}" if layers else step.name
        sizes = (f"{step.nbytes:,}", f"{step.operations:,}", step.bound)
        rows.append(
            (label, step.kernel, step.source, step.precision, lost, step.activations, error, step.tactics, *sizes)
        )
    told = "tactics: how a timed matmul shares its work for 1, 2-8, 9-32 and more rows; 0 as shipped, same results"
    return [*aligned(rows, words=len(words)), *_legend(plan), *([told] if any(each.tactics for each in steps) else [])]


def short_table(plan: Plan, steps: Sequence[StepInfo]) -> list[str]:
    """Step, kernel, precision, bytes, operations and bound in 80 columns."""
    rows = [("kernel call", "kernel", "precision", "bytes", "ops", "bound")]
    before = ""
    for layers, step, _, _ in _groups(steps):
        if layers and layers != before:
            rows.append((f"layers {layers}", "", "", "", "", ""))
        before = layers
        name = f"  {step.name}" if layers else step.name
        sizes = (_rounded(step.nbytes), _rounded(step.operations))
        rows.append((name, step.kernel, step.precision, *sizes, step.bound))
    inputs = {each.activations for each in steps} - {"", "f32"}
    legend = _legend(plan)
    if "int8" in inputs:
        legend.append("a8 in a kernel's name: it rounds its inputs to 8 bits; --all lists the error")
    if "fp8" in inputs:
        legend.append("f8f8 in a kernel's name: FP8 weights times inputs in FP8")
    return [*aligned(rows, words=3), *legend]


def _legend(plan: Plan) -> list[str]:
    context = min(CONTEXT, plan.limits.max_seq_len) - 1
    return [
        f"bytes, ops (operations): of one token after {context:,} others",
        f"bound: compute above {BALANCE:g} operations per byte, else memory; `ingot bench kernels` measures it",
    ]


def _rounded(count: int) -> str:
    """1,234,567 → "1.2 M"."""
    for unit, word in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.{0 if count >= 100 * unit else 1}f} {word}"
    return str(count)


def aligned(rows: Sequence[tuple[str, ...]], words: int) -> list[str]:
    """The first `words` columns to the left, the others, which are numbers but for the last, to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = range(words, len(widths) - 1)
    sides = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return ["  ".join(side(cell, n) for side, cell, n in zip(sides, row, widths, strict=True)).rstrip() for row in rows]


def _span(errors: Sequence[float | None]) -> str:
    """[0.012, None, 0.03] → "1.2-3%"."""
    known = [error for error in errors if error is not None]
    shown = list(dict.fromkeys(f"{100 * error:.2g}" for error in (min(known), max(known)))) if known else []
    return "-".join(shown) + "%" if shown else ""
