"""`ingot verify`: is the Engine what was built, and does it compute what its source says?"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from ingot.checkpoint import CALIBRATION
from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.values import LocalPath, as_json, log_level, positive, target_isa
from ingot.compare.compare import DEFAULT_TOKENS, CompareOptions, comparable_targets, compare
from ingot.compare.report import Comparison, StepFigures
from ingot.configs.sizes import format_bytes
from ingot.engine import read_manifest
from ingot.engine_writer import store_verification
from ingot.errors import UsageError
from ingot.manifest import Fact
from ingot.verify import VerifyReport, verify


@click.command()
@click.argument("engine", type=LocalPath(path_type=Path))
@click.option(
    "--against",
    type=LocalPath(path_type=Path),
    metavar="SOURCE",
    help="Compare weights, the output of every kernel call and the logits with this Checkpoint, "
    "Hugging Face directory or GGUF file.",
)
@click.option(
    "--text",
    type=LocalPath(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Compare on this text. Default: a text that ships with ingot.",
)
@click.option(
    "--tokens", type=click.IntRange(min=2), help=f"Compare on this many tokens of the text. Default: {DEFAULT_TOKENS}."
)
@click.option(
    "--store_results", "store", is_flag=True, help="Store the result in the engine; `ingot inspect` prints it."
)
@click.option(
    "--threads", type=positive, help="Use this many threads. Default: one for each core that the process may use."
)
@target_isa
@as_json
@log_level
def command(
    engine: Path,
    against: Path | None,
    text: Path | None,
    tokens: int | None,
    store: bool,
    threads: int | None,
    isa: str | None,
    target: str | None,
    as_json: bool,
    log_level: str,
) -> None:
    """Check every hash of an Engine. With --against, also compare what each target computes with the source.

    Targets that this machine cannot run are not compared.

    \b
    Example: ingot verify engine --against checkpoint
    """
    if against is None and (text is not None or tokens is not None or store or target is not None):
        raise UsageError(
            "--text, --tokens, --target and --store_results need --against", hint="add --against CHECKPOINT"
        )
    options = CompareOptions(tokens=tokens or DEFAULT_TOKENS, text=text, threads=threads, isa=isa, target=target)
    with CliConsole(LEVELS[log_level]) as console:
        report = verify(engine, console.progress_bytes)
        comparisons = [] if against is None else _compare(engine, against, options, tokens, console)
    if as_json:
        print(json.dumps({**_hashes(report), **_document(comparisons)}, indent=1))
    else:
        parts = f"{len(report.manifest.parts)} parts, {format_bytes(report.nbytes)}, all hashes match"
        lines = [line for comparison in comparisons for line in comparison.lines()]
        print("\n".join([f"{report.directory}: {parts}", *lines, _verdict(comparisons)]))
    for comparison in comparisons:
        _judge(comparison, store, console)


def _compare(
    engine: Path, against: Path, options: CompareOptions, asked: int | None, console: CliConsole
) -> list[Comparison]:
    """One comparison for each target that this machine runs; the others get a warning that says why not. asked: the
    value of --tokens, if it was given."""
    fit = comparable_targets(engine, options)
    fit.best()
    for line in fit.lines():
        console.warn(f"not compared here: {line}")
    comparisons = []
    for target in fit.runs:
        compared = compare(engine, against, dataclasses.replace(options, target=target.name), console.progress)
        done = compared.logits.positions + compared.logits.left_out
        if asked is not None and done < asked:
            console.warn(
                f"{done} tokens were compared, not {asked}: {compared.text} is too short for more whole sequences"
            )
        comparisons.append(compared)
        for step in compared.steps:
            console.detail(_line(step))
    return comparisons


def _verdict(comparisons: list[Comparison]) -> str:
    """The last line: yes or no, and what was asked."""
    wrong = [comparison.target for comparison in comparisons if comparison.findings]
    if wrong:
        return f"verify: FAILED, {', '.join(wrong)} does not compute what the source says"
    if comparisons:
        return "verify: OK, all hashes match, and every weight, kernel and layer is within its tolerance"
    return "verify: OK, all hashes match; --against CHECKPOINT compares what the engine computes, too"


def _document(comparisons: list[Comparison]) -> dict[str, Any]:
    """The record of one comparison, or a list of records."""
    if len(comparisons) == 1:
        return comparisons[0].document()
    return {"comparisons": [comparison.document() for comparison in comparisons]} if comparisons else {}


def _judge(comparison: Comparison, store: bool, console: CliConsole) -> None:
    """Raises EngineError where something is beyond its tolerance."""
    comparison.raise_if_wrong()
    for note in comparison.notes:
        console.warn(note)
    if store:
        store_verification(comparison.engine, comparison.target, comparison.results() | _origin(comparison))
        console.note(f"wrote the results into {comparison.engine}")


def _origin(comparison: Comparison) -> dict[str, Fact]:
    """What the weights were quantised from and on, where they were before the build; the manifest has it by weight."""
    manifest = read_manifest(comparison.engine).of(comparison.target)
    found: dict[str, Fact] = {}
    if (kinds := manifest.model.get("quantised_source")) is not None:
        found["quantised_source"] = kinds
    if (text := manifest.sources.get(CALIBRATION)) is not None:
        found["calibration_text"] = text
    return found


def _hashes(report: VerifyReport) -> dict[str, object]:
    parts = {part.name: part.sha256 for part in report.manifest.parts}
    return {"engine": str(report.directory), "bytes": report.nbytes, "sha256": parts}


def _line(step: StepFigures) -> str:
    model = "" if step.model_error is None else f", {step.model_error:.2e} off the model (bound {step.model_bound:.2e})"
    kernel = "" if step.kernel_error is None else f", kernel {step.kernel_error:.2f} of its bound"
    return f"{step.name}: weights {step.weight_error:.2e} off{kernel}{model}"
