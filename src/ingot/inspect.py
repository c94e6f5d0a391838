"""Says what a Checkpoint, an ONNX graph or an Engine holds, without loading weights; `step_table` lists the steps."""

import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.builder.summary import GraphSummary, summarise
from ingot.cache_info import bytes_per_token, cache_lines, least_bytes, sequence_bytes
from ingot.checkpoint import Checkpoint, is_checkpoint
from ingot.configs.read import write_record
from ingot.configs.sizes import format_bytes
from ingot.engine import is_engine, read_manifest, read_plan
from ingot.errors import REBUILD, EngineError, UsageError
from ingot.lost_codes import lost_lines
from ingot.manifest import MANIFEST_NAME, Fact, Manifest, rank_file
from ingot.plan import Plan, Variant
from ingot.plan_tiles import Tiling
from ingot.plugins.cuda.estimate import estimates
from ingot.plugins.cuda.plan_facts import CODE_LAYOUT
from ingot.plugins.tensorrt.description import DESCRIPTION, description_lines, read_description
from ingot.step_table import layer_words, short_table, step_info, whole_table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The same for people and for programs. text: all of them; summary: what most readers want, in lines that
    can be wrapped and tables of 80 columns."""

    text: str
    summary: str
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
        "the path is neither an Engine nor a Checkpoint nor an .onnx file",
        where=str(path),
        expected="an Engine directory, a Checkpoint directory or an .onnx file",
        got="no such file" if not path.exists() else "another file" if path.is_file() else "another directory",
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
    parts = ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in manifest.parts)
    short = [*head[:4], f"files       {parts}; --all lists their sources"]
    gap = "" if len(targets) == 1 else "\n"
    return Inspection(
        text="\n".join([*head, *(gap + target.text for target in targets)]),
        summary="\n".join([*short, *(gap + target.summary for target in targets)]),
        document=document,
    )


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
            "the engine's description of a target cannot be read",
            where=f"{path}: {target}",
            got=repr(error)[:200],
            hint=REBUILD,
        ) from error


def _describe_target(path: Path, manifest: Manifest, plan: Plan) -> Inspection:
    steps = step_info(
        plan, manifest.activation_errors, weight_errors=manifest.weight_errors, weight_sources=manifest.weight_sources
    )
    file, code = rank_file(0, manifest.files), _machine_code(plan, manifest)
    network = _network(path, manifest)
    ranks, speed = _ranks(path, manifest), estimates(plan, manifest.target)
    document: dict[str, Any] = {
        "target": manifest.target,
        "precision": manifest.precision,
        "file": file,
        **({"ranks": ranks} if ranks else {}),
        "caches": [{**write_record(each), "bytes_per_token": bytes_per_token(each)} for each in plan.caches],
        "sequence_bytes": sequence_bytes(plan),
        "least_kv_bytes": least_bytes(plan),
        "arena_bytes": plan.arena_bytes,
        "inputs": [write_record(each) for each in plan.inputs],
        "buffers": [write_record(each) for each in plan.buffers],
        "weight_bytes": plan.weight_bytes,
        **_chosen(plan),
        "steps": [dataclasses.asdict(each) for each in steps],
        "lost_codes": dict(manifest.lost_codes),
        "built_with": dict(manifest.built_with),
        "verification": dict(manifest.verification),
        **({"code": code} if code else {}),
        **({"network": network} if network else {}),
        **({"estimate": [each.record() for each in speed]} if speed else {}),
    }
    lines = [
        f"target      {manifest.target} in {manifest.precision}: plan and weights in {file}",
        f"weights     {format_bytes(plan.weight_bytes)} packed",
        *(
            f"rank        {each['file']}: {_place(each)}{format_bytes(each['weight_bytes'])} of weights, "
            f"{format_bytes(each['kv_bytes_per_token'])} of KV cache a token"
            for each in ranks
        ),
        f"inputs      {', '.join(map(str, plan.inputs))}",
        f"activations {format_bytes(plan.arena_bytes)}: {_buffer_words(plan)}",
        *cache_lines(plan),
        *([f"sums        in {plan.sum_parts} parts where ranks divide them"] if plan.sum_parts > 1 else []),
        *(f"estimate    {each}" for each in speed),
        *(f"not kept    codes of {each}" for each in lost_lines(manifest.lost_codes)),
    ]
    tables = [line for each in speed for line in ("", *each.table())]
    rest = [
        *(_variant_line(plan, each) for each in plan.variants),
        *_chosen_lines(plan),
        *(
            f"code        for {each['architecture']}: {each['bytes']:,} bytes at {each['offset']:,} of {file}"
            for each in code
        ),
        *([f"built with  {_versions(manifest)}"] if manifest.built_with else []),
        *(description_lines(network) if network else ()),
    ]
    verification = _verification_lines(manifest.verification)
    return Inspection(
        text="\n".join([*lines, *rest, *verification, "", *whole_table(plan, steps), *tables]),
        summary="\n".join([*lines, *verification, "", *short_table(plan, steps)]),
        document=document,
    )


def _ranks(path: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """What each rank holds, where there are several: the steps are those of the first."""
    if manifest.ranks == 1:
        return []
    plans = [read_plan(path, rank, manifest.target) for rank in range(manifest.ranks)]
    return [
        {
            "file": rank_file(rank, manifest.files),
            "stage": plan.stage[0],
            "stages": plan.stage[1],
            "tp_rank": rank % (manifest.ranks // plan.stage[1]),
            "cache_layers": plan.num_layers,
            "weight_bytes": plan.weight_bytes,
            "kv_bytes_per_token": sum(bytes_per_token(group) for group in plan.caches),
        }
        for rank, plan in enumerate(plans)
    ]


def _place(rank: Mapping[str, Any]) -> str:
    """Where a rank is among pipeline stages, if there are several."""
    if rank["stages"] == 1:
        return ""
    return f"stage {rank['stage']} of {rank['stages']}, rank {rank['tp_rank']} of it, {rank['cache_layers']} layers, "


def _buffer_words(plan: Plan) -> str:
    """How many buffers there are of each type."""
    counts = Counter(buffer.dtype.value for buffer in plan.buffers)
    return ", ".join(f"{count} buffers of {dtype}" for dtype, count in counts.items())


def _variant_line(plan: Plan, variant: Variant) -> str:
    """How the steps are called for this many tokens."""
    counts = {
        "calls": len(variant.calls),
        "barriers": sum(call.waits for call in variant.calls),
        "norms by every thread": sum(call.private for call in variant.calls),
        "norms in matmuls": len(variant.inside() - variant.called()),
        "rotations in attention": sum(call.kv_only for call in variant.calls),
    }
    shown = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return (
        f"variant     {variant.name}: {len(plan.steps)} kernel calls of at most {variant.most_tokens} tokens in {shown}"
    )


def _chosen(plan: Plan) -> dict[str, Any]:
    """What passes have decided of whole steps."""
    return {
        "sum_parts": plan.sum_parts,
        "decode_tokens": plan.decode_tokens,
        "splits": [write_record(each) for each in plan.splits],
        "draw_kernel": plan.draw_kernel,
        "decode_sizes": list(plan.decode_sizes),
        "tilings": [write_record(each) for each in plan.tilings],
        "variants": [write_record(each) for each in plan.variants],
    }


def _chosen_lines(plan: Plan) -> list[str]:
    """Into how many parts attention cuts contexts, which kernels draw tokens and compute matmuls, which decode steps
    are CUDA graphs."""
    lines = []
    if plan.splits:
        words = ", ".join(f"{each.parts} up to {each.most_items}" for each in plan.splits)
        least = plan.splits[0].least_tokens
        lines.append(f"attention   parts of a context by sequences: {words}; at least {least} tokens each")
    if plan.draw_kernel:
        lines.append(f"draws       tokens by {plan.draw_kernel}")
    if plan.decode_sizes:
        sizes = ", ".join(map(str, plan.decode_sizes))
        lines.append(f"graphs      of decode steps with {sizes} sequences; smaller batches are filled up")
    lines += [f"tiles       {', '.join(layer_words(each.steps))}: {_tile_words(each)}" for each in plan.tilings]
    return lines


def _tile_words(tiling: Tiling) -> str:
    """The kernels of few and of many rows."""
    *some, last = tiling.tiles
    return ", ".join([*map(str, some), f"{last.words()} for more" if some else last.words()])


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
    """What a compiled network is, if the target has one, by the description that was built."""
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


def _verification_lines(results: Mapping[str, Fact]) -> list[str]:
    """What `ingot verify --store_results` found."""
    if not results:
        return []
    words = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in results.items())
    return [f"verified    {', '.join(words)} (as ingot verify has measured)"]


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
    told, every = dict(_told(model)), dict(_flat(model))
    head = f"Checkpoint, converted by ingot {config.ingot_version or '(unknown)'}"
    lines = [
        "files       " + (", ".join(files) or "no tokenizer or generation files"),
        *(f"quantised   {kind}: {count} weights" for kind, count in Counter(config.quantised.values()).most_common()),
        *(f"warning     {name} holds {count} NaN or infinite values" for name, count in config.nonfinite.items()),
        "",
        graph.text,
    ]
    return Inspection(
        text="\n".join([head, f"model       {_listed(every)}", *lines]),
        summary="\n".join([head, f"model       {_listed(told)}", *lines]),
        document=document,
    )


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of a record; keys of records in it are joined by dots: rope.theta."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _told(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`_flat` without what the model does not have, and factors of one."""
    return (
        (key, value)
        for key, value in _flat(record)
        if value not in (None, [], "", 0, 0.0, False) and not (isinstance(value, float) and value == 1)
    )


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items()) or "not described"


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
    return Inspection(text="\n".join(lines), summary="\n".join(lines), document=document)
