"""`ingot verify`: is the Engine what was built, and does it compute what its source says?"""

import json
from pathlib import Path

import click

from ingot.cli.console import LEVELS, Talk
from ingot.cli.values import as_json, log_level, positive, target_isa
from ingot.compare.compare import DEFAULT_TOKENS, CompareOptions, compare
from ingot.compare.report import Comparison, StepFigures
from ingot.configs.sizes import format_bytes
from ingot.engine_writer import store_passport
from ingot.errors import UsageError
from ingot.verify import VerifyReport, verify


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="SOURCE",
    help="Checkpoint or Hugging Face directory: compare weights, every step and the logits with it.",
)  # fmt: skip
@click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="What to compare on; a text that ships with ingot unless given.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(min=2), help=f"Tokens of the text to compare on ({DEFAULT_TOKENS}).")
@click.option("--store_passport", "store", is_flag=True, help="Write the summary into the engine; `inspect` prints it.")
@click.option("--threads", type=positive, help="Threads of the engine's kernels; every core unless given.")
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
    as_json: bool,
    log_level: str,
) -> None:
    """Check every hash of an Engine; with --against also its numbers.

    \b
    Example: ingot verify engine --against checkpoint
    """
    if against is None and (text is not None or tokens is not None or store):
        raise UsageError("--text, --tokens and --store_passport go with --against", hint="say what to compare with")
    options = CompareOptions(tokens=tokens or DEFAULT_TOKENS, text=text, threads=threads, isa=isa)
    with Talk(LEVELS[log_level]) as talk:
        report = verify(engine, talk.progress_bytes)
        comparison = None if against is None else compare(engine, against, options, talk.progress)
        for step in () if comparison is None else comparison.steps:
            talk.detail(_line(step))
    if as_json:
        print(json.dumps({**_hashes(report), **({} if comparison is None else comparison.document())}, indent=1))
    else:
        parts = f"{len(report.manifest.parts)} parts, {format_bytes(report.nbytes)}, all hashes match"
        print("\n".join([f"{report.directory}: {parts}", *([] if comparison is None else comparison.lines())]))
    if comparison is not None:
        _judge(comparison, store, talk)


def _judge(comparison: Comparison, store: bool, talk: Talk) -> None:
    """Raises EngineError where something is beyond its tolerance."""
    comparison.raise_if_wrong()
    for note in comparison.notes:
        talk.warn(note)
    if store:
        store_passport(comparison.engine, comparison.passport())
        talk.note(f"the passport is in {comparison.engine}")


def _hashes(report: VerifyReport) -> dict[str, object]:
    parts = {part.name: part.sha256 for part in report.manifest.parts}
    return {"engine": str(report.directory), "bytes": report.nbytes, "sha256": parts}


def _line(step: StepFigures) -> str:
    model = "" if step.model_error is None else f", {step.model_error:.2e} off the model (bound {step.model_bound:.2e})"
    return f"{step.name}: weights {step.weight_error:.2e} off, kernel {step.kernel_error:.2f} of its bound{model}"
