"""`ingot quickstart`: the text on stdout, the report on one screen of stderr (or, with --json, on stdout)."""

import contextlib
import dataclasses
import json
import shlex
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.values import LocalPath, as_json, log_level
from ingot.configs.sizes import format_bytes
from ingot.errors import install
from ingot.quickstart import QuickstartReport, quickstart


@click.command()
@click.option(
    "--output_dir",
    type=LocalPath(path_type=Path),
    help="Keep the Checkpoint and the Engine here. Default: delete them at the end.",
)
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    help="Build for this target; cpu is the best instruction set of this machine.",
)
@as_json
@log_level
def command(output_dir: Path | None, target: str, as_json: bool, log_level: str) -> None:
    """Convert, build and run the small model that ships with ingot, and report times. Needs no network.

    \b
    Example: ingot quickstart --output_dir first-engine
    """
    place = contextlib.nullcontext(output_dir) if output_dir else tempfile.TemporaryDirectory(prefix="ingot-")
    with place as work, CliConsole(LEVELS[log_level]) as console:

        def write(text: str) -> None:
            console.hide()
            print(text, end="", file=sys.stderr if as_json else sys.stdout, flush=True)

        report = quickstart(Path(work), target, console.progress_bytes, write)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show(report, kept=output_dir is not None)


def _show(report: QuickstartReport, *, kept: bool) -> None:
    table = Table.grid(padding=(0, 2))
    for row in _rows(report, kept=kept):
        table.add_row(*row)
    console = Console(stderr=True)
    console.print()
    console.print(table, highlight=False, markup=False)
    commands = next_commands(Path(report.engine_dir) if kept else None)
    console.print(
        "\n".join(["", "next", *(f"  {each}" for each in commands)]), highlight=False, markup=False, soft_wrap=True
    )


def _rows(report: QuickstartReport, *, kept: bool) -> list[tuple[str, str, str]]:
    """(name, figure, what it means)."""
    tpot, share = report.tpot_ms, report.bandwidth_fraction
    place = report.engine_dir if kept else "a temporary directory, removed"
    ttft = f"time to first token: read the {report.prompt_tokens} prompt tokens, write one"
    rows = [
        ("model", report.precision, report.model),
        ("target", report.target, report.target_why),
        ("build", f"{report.build_seconds:.2f} s", f"with at most {format_bytes(report.peak_memory_bytes)} of memory"),
        ("engine", format_bytes(report.engine_bytes), f"in {place}"),
        ("load", f"{report.load_ms:.1f} ms", "open the engine, check every byte"),
        ("TTFT", f"{report.ttft_ms:.2f} ms", ttft),
    ]
    by_schema = ("JSON", *_by_schema(report))
    if tpot is None or share is None:
        unknown = ("TPOT", "unknown", "all tokens came at once: run it again when this machine has less to do")
        return [*rows, unknown, by_schema]
    return [
        *rows,
        (
            "TPOT",
            f"{tpot:.3f} ms",
            f"time per output token: {1e3 / tpot:,.0f} tokens/s, mean of {report.tokens} tokens",
        ),
        (
            "bandwidth",
            f"{share:.0%}",
            f"of the {report.machine_gbs:.1f} GB/s that this machine reads: every token reads all weights once, so "
            "100% is the limit",
        ),
        by_schema,
    ]


def _by_schema(report: QuickstartReport) -> tuple[str, str]:
    if report.schema_answer is None:
        return "not shown", f"needs llguidance: {install('guided')}"
    return "valid", "a grammar keeps every answer to its schema; what it says is up to the model, and this one is small"


def next_commands(engine: Path | None, *, can_serve: bool = find_spec("uvicorn") is not None) -> list[str]:
    """Two commands that work as they are printed, for a kept engine or none; MODEL stands for the reader's."""
    ingot = _program()
    if engine is None:
        first = f"{ingot} quickstart --output_dir quickstart"
    elif can_serve:
        first = f"{ingot} serve --engine_dir {shlex.quote(str(engine))}"
    else:
        first = f'{ingot} run --engine_dir {shlex.quote(str(engine))} --prompt "The prince" --stream'
    return [first, f"{ingot} convert --model_dir MODEL --output_dir checkpoint   # MODEL: a directory"]


def _program() -> str:
    """How a shell in this directory starts this very ingot."""
    script = Path(sys.executable).with_name("ingot")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m ingot"
    if (found := shutil.which("ingot")) is not None and Path(found).absolute() == script:
        return "ingot"
    return shlex.quote(str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script))
