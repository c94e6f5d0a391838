"""Says what a Checkpoint, an ONNX graph or an Engine holds, without loading weights.

Of an engine every step is listed: kernel, precision, bytes it reads, operations, and what bounds it on a machine that
computes BALANCE operations in the time it reads a byte.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.builder.summary import GraphSummary, summarise
from ingot.checkpoint import Checkpoint, is_checkpoint
from ingot.configs.read import write_record
from ingot.configs.sizes import format_bytes
from ingot.dtypes import Precision
from ingot.engine import is_engine, read_manifest, read_plan
from ingot.errors import REBUILD, EngineError, UsageError
from ingot.manifest import MANIFEST_NAME, Fact, Manifest, rank_file
from ingot.plan import Plan, Step, Variant, Weight
from ingot.plugins.cuda.bind import CODE_LAYOUT
from ingot.plugins.tensorrt.description import DESCRIPTION, description_lines, read_description
from ingot.step_work import SCREEN_ROWS, Load, PlanWork, Work

BALANCE = 8.0  # operations per byte, assumed: `ingot bench` measures what a machine really does
CONTEXT = 1024  # tokens an attention looks back at, where the limits allow


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """One step with one token: bytes of weights, cache and activations it moves; a multiply-add is two operations.

    activations  what a product rounds its input to; "" of other steps
    int8_error   relative error of the product with int8 inputs, as measured at build; None where it was not
    tactics      how a product that was timed at build shares its work for 1, 2-8, 9-32 and more rows, a digit each
                 (0: as shipped); "" of other steps
    """

    name: str
    kernel: str
    precision: str
    activations: str
    int8_error: float | None
    tactics: str
    nbytes: int
    operations: int
    bound: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The same facts for people and for programs."""

    text: str
    document: dict[str, Any]

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.document, indent=2)


def inspect(path: Path | str) -> Inspection:
    """What lies at `path`: an Engine or Checkpoint directory, or an .onnx file. Raises UsageError for anything else."""
    path = Path(path)
    if path.suffix == ".onnx" and path.is_file():
        return _inspect_graph(summarise(path), path)
    if path.is_dir() and is_engine(path):
        return _inspect_engine(path)
    if path.is_dir() and is_checkpoint(path):
        return _inspect_checkpoint(path)
    if path.is_dir() and (path / MANIFEST_NAME).is_file():
        read_manifest(path)  # says what is wrong with it
    raise UsageError(
        "there is nothing here that ingot can inspect",
        where=str(path),
        expected="an Engine directory, a Checkpoint directory or an .onnx file",
        got="no such file" if not path.exists() else "something else",
    )


def step_facts(plan: Plan, errors: Mapping[str, float | None] | None = None, context: int = CONTEXT) -> list[StepFacts]:
    """Of every step, for one token that sees `context` tokens, itself included. errors: of int8 inputs, by step."""
    work = PlanWork(plan)
    weights = {weight.name: weight for weight in plan.weights}
    load = Load(sequences=[(min(context, plan.limits.max_seq_len) - 1, 1)], rows=1)
    return [
        _facts(step, work.of(step, load), weights, (errors or {}).get(step.name), plan.tactics.get(step.name, ""))
        for step in plan.steps
    ]


def _facts(step: Step, work: Work, weights: Mapping[str, Weight], error: float | None, tactics: str) -> StepFacts:
    products = [weights[name] for name in step.inputs if name in weights and "group" in step.attrs]
    precision = step.kernel.split(".")[1]
    if products:
        precision = str(Precision(dtype=products[0].dtype, group=int(step.attrs["group"])))
    return StepFacts(
        name=step.name,
        kernel=step.kernel,
        precision=precision,
        activations=str(step.attrs.get("activations", "")),
        int8_error=error,
        tactics=tactics,
        nbytes=work.nbytes,
        operations=work.operations,
        bound="compute" if work.operations > BALANCE * work.nbytes else "memory",
    )


def _inspect_engine(path: Path) -> Inspection:
    manifest = read_manifest(path)
    targets = [_inspect_target(path, manifest.of(name)) for name in manifest.targets]
    tokens = {"eos_ids": list(manifest.eos_ids), "bos_id": manifest.bos_id, "pad_id": manifest.pad_id}
    limits = dataclasses.asdict(manifest.limits)
    document: dict[str, Any] = {
        "kind": "engine",
        "ingot_version": manifest.ingot_version,
        "model": dict(manifest.model),
        "limits": limits,
        "capabilities": list(manifest.capabilities),
        **tokens,
        "parts": {part.name: {"bytes": part.nbytes, "sha256": part.sha256} for part in manifest.parts},
        "sources": dict(manifest.sources),
        **(targets[0].document if len(targets) == 1 else {"targets": [target.document for target in targets]}),
    }
    kinds = " and ".join(f"{name} in {manifest.of(name).precision}" for name in manifest.targets)
    head = [
        f"Engine for {kinds}, built by ingot {manifest.ingot_version}",
        "model       " + ", ".join(f"{key} {value}" for key, value in manifest.model.items() if value is not None),
        "limits      " + ", ".join(f"{key} {value}" for key, value in limits.items()),
        "tokens      " + ", ".join(f"{key} {value}" for key, value in tokens.items()),
        *(f"part        {part.name}: {format_bytes(part.nbytes)}" for part in manifest.parts),
        *(f"source      {name} {sha256}" for name, sha256 in manifest.sources.items()),
    ]
    texts = (target.text if len(targets) == 1 else f"\n{target.text}" for target in targets)
    return Inspection(text="\n".join([*head, *texts]), document=document)


def _inspect_target(path: Path, manifest: Manifest) -> Inspection:
    """What differs between the targets of an engine."""
    plan = read_plan(path, target=manifest.target)
    with _followed(path, manifest.target):
        return _describe_target(path, manifest, plan)


@contextlib.contextmanager
def _followed(path: Path, target: str) -> Iterator[None]:
    """A plan or a description may be sound as JSON and make no sense to who looks at its steps: an EngineError, too."""
    try:
        yield
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
        raise EngineError(
            "what the engine says about a target cannot be followed",
            where=f"{path}: {target}",
            got=repr(error)[:200],
            hint=REBUILD,
        ) from error


def _describe_target(path: Path, manifest: Manifest, plan: Plan) -> Inspection:
    facts = step_facts(plan, manifest.activation_errors)
    block = plan.kv.block_bytes // plan.kv.tokens_per_block
    file, code = rank_file(0, manifest.files), _machine_code(plan, manifest)
    network = _network(path, manifest)
    document: dict[str, Any] = {
        "target": manifest.target,
        "precision": manifest.precision,
        "file": file,
        "kv": {**write_record(plan.kv), "bytes_per_token": block},
        "arena_bytes": plan.arena_bytes,
        "weight_bytes": plan.weight_bytes,
        "screen": [each.name for each in plan.screen],
        "variants": [write_record(each) for each in plan.variants],
        "steps": [dataclasses.asdict(each) for each in facts],
        "built_with": dict(manifest.built_with),
        "passport": dict(manifest.passport),
        **({"code": code} if code else {}),
        **({"network": network} if network else {}),
    }
    lines = [
        f"target      {manifest.target} in {manifest.precision}: plan and weights in {file}",
        f"weights     {format_bytes(plan.weight_bytes)} packed, activations {format_bytes(plan.arena_bytes)}",
        f"KV cache    {plan.kv.dtype.value}, {format_bytes(block)} a token, {plan.kv.tokens_per_block} tokens a block",
        *_screen_lines(plan),
        *(_variant_line(plan, each) for each in plan.variants),
        *(
            f"code        for {each['architecture']}: {each['bytes']:,} bytes at {each['offset']:,} of {file}"
            for each in code
        ),
        *([f"built with  {_versions(manifest)}"] if manifest.built_with else []),
        *(description_lines(network) if network else ()),
        *_passport_lines(manifest.passport),
        "",
    ]
    return Inspection(text="\n".join([*lines, *_step_table(facts)]), document=document)


def _screen_lines(plan: Plan) -> list[str]:
    """What greedy steps of few rows read in place of the last step's weight."""
    if not plan.screen:
        return []
    sizes = {weight.name: format_bytes(weight.nbytes) for weight in plan.weights}
    full, codes = (sizes[step.inputs[1]] for step in (plan.steps[-1], plan.screen[0]))
    name = plan.steps[-1].name
    return [f"screen      {codes} of codes for {full} of {name}, in greedy steps of at most {SCREEN_ROWS} rows"]


def _variant_line(plan: Plan, variant: Variant) -> str:
    """How the steps are called for so many tokens."""
    counts = {
        "calls": len(variant.calls),
        "barriers": sum(call.waits for call in variant.calls),
        "norms by every thread": sum(call.private for call in variant.calls),
        "norms in products": len(variant.inside() - variant.called()),
        "rotations in attention": len(variant.inside() & variant.called()),
    }
    shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"variant     {variant.name}: {len(plan.steps)} steps of at most {variant.most_tokens} tokens in {shown}"


def _versions(manifest: Manifest) -> str:
    return ", ".join(f"{name} {version}" for name, version in manifest.built_with.items())


def _machine_code(plan: Plan, manifest: Manifest) -> list[dict[str, Any]]:
    """Where the cubins of a GPU engine lie in the rank file."""
    part = manifest.part(rank_file(0, manifest.files))
    begin = 0 if part is None else part.nbytes - plan.weight_bytes  # the weights section ends the file
    return [
        {
            "architecture": weight.layout.removeprefix(CODE_LAYOUT),
            "offset": begin + weight.pieces[0].offset,
            "bytes": weight.nbytes,
        }
        for weight in plan.weights
        if weight.layout.startswith(CODE_LAYOUT)
    ]


def _network(path: Path, manifest: Manifest) -> dict[str, Any] | None:
    """What a compiled network is, if the target has one, by the very description that was built."""
    for part in manifest.parts:
        if part.name.endswith(DESCRIPTION):
            found = hashlib.sha256((path / part.name).read_bytes()).hexdigest()
            if found != part.sha256:
                raise EngineError(
                    "the engine is damaged: SHA-256 differs",
                    where=str(path / part.name),
                    expected=part.sha256,
                    got=found,
                    hint="copy the engine again, or build the engine again",
                )
    return read_description(path, manifest.target)


def _passport_lines(passport: Mapping[str, Fact]) -> list[str]:
    if not passport:
        return []
    words = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in passport.items())
    return [f"passport    {', '.join(words)}"]


def _step_table(facts: list[StepFacts]) -> list[str]:
    """One line per step; layers that do the same share their lines."""
    groups: dict[tuple[bool, StepFacts], list[tuple[int, float | None]]] = {}
    for each in facts:
        layer = re.match(r"layers\.(\d+)/", each.name)
        name = each.name[layer.end() :] if layer else each.name
        same = (layer is not None, dataclasses.replace(each, name=name, int8_error=None))
        groups.setdefault(same, []).append((int(layer[1]) if layer else -1, each.int8_error))
    rows = [("step", "kernel", "precision", "activations", "int8 error", "tactics", "bytes", "operations", "bound")]
    for (in_layer, step), members in groups.items():
        label = f"layers.{_ranges([layer for layer, _ in members])}/{step.name}" if in_layer else step.name
        error = _span([error for _, error in members if error is not None])
        rows.append(
            (
                label,
                step.kernel,
                step.precision,
                step.activations,
                error,
                step.tactics,
                f"{step.nbytes:,}",
                f"{step.operations:,}",
                step.bound,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(f"one token after at most {CONTEXT} others; bound by compute above {BALANCE:g} operations per byte")
    told = "tactics: how a timed product shares its work for 1, 2-8, 9-32 and more rows; 0 as shipped, same results"
    return [*lines, told] if any(each.tactics for each in facts) else lines


def _span(errors: list[float]) -> str:
    """[0.012, 0.03] → "1.2-3%"."""
    shown = list(dict.fromkeys(f"{100 * error:.2g}" for error in (min(errors), max(errors)))) if errors else []
    return "-".join(shown) + "%" if shown else ""


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _inspect_checkpoint(path: Path) -> Inspection:
    checkpoint = Checkpoint.open(path)
    graph = _inspect_graph(summarise(checkpoint.graph_path), checkpoint.graph_path)
    config = checkpoint.config
    model = {} if config.model is None else write_record(config.model)
    files = sorted(file.as_posix() for file in checkpoint.companions())
    document = {
        "kind": "checkpoint",
        "ingot_version": config.ingot_version,
        "model": model,
        "sources": dict(config.sources),
        "nonfinite": dict(config.nonfinite),
        "quantised": dict(config.quantised),
        "files": files,
        "graph": graph.document,
    }
    lines = [
        f"Checkpoint, converted by ingot {config.ingot_version or '(unknown)'}",
        "model       " + (", ".join(f"{key} {value}" for key, value in model.items()) or "not described"),
        "files       " + (", ".join(files) or "no tokenizer or generation files"),
        *(f"quantised   {kind}: {count} weights" for kind, count in Counter(config.quantised.values()).most_common()),
        *(f"warning     {name} holds {count} NaN or infinite values" for name, count in config.nonfinite.items()),
        "",
        graph.text,
    ]
    return Inspection(text="\n".join(lines), document=document)


def _inspect_graph(summary: GraphSummary, path: Path) -> Inspection:
    document = {"kind": "graph", **dataclasses.asdict(summary)}
    weights = ", ".join(f"{format_bytes(nbytes)} of {dtype}" for dtype, nbytes in summary.weights.items())
    lines = [
        f"ONNX graph {path.name}, opset {summary.opset}",
        *(f"input       {each}" for each in summary.inputs),
        *(f"output      {each}" for each in summary.outputs),
        f"weights     {weights or 'none outside the file'}, in {', '.join(summary.files) or 'no file'}",
        "ops         " + ", ".join(f"{count} {op}" for op, count in summary.ops.items()),
    ]
    return Inspection(text="\n".join(lines), document=document)
