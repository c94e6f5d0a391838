"""`ingot quickstart`: the text on stdout, the report on one screen of stderr (or, with --json, on stdout)."""

import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ingot.cli.console import LEVELS, Talk
from ingot.cli.values import as_json, log_level
from ingot.configs.sizes import format_bytes
from ingot.quickstart import QuickstartReport, quickstart


@click.command()
@click.option(
    "--output_dir",
    type=click.Path(path_type=Path),
    help="Keep Checkpoint and Engine in this directory. Without it they are deleted.",
)
@click.option("--target", default="cpu", show_default=True, help="Kind of machine; cpu is the best ISA of this one.")
@as_json
@log_level
def command(output_dir: Path | None, target: str, as_json: bool, log_level: str) -> None:
    """The whole path on the small model that ships with ingot: convert, build, generate, report. No network.

    \b
    Example: ingot quickstart --output_dir first-engine
    """
    place = contextlib.nullcontext(output_dir) if output_dir else tempfile.TemporaryDirectory(prefix="ingot-")
    with place as work, Talk(LEVELS[log_level]) as talk:
        report = quickstart(Path(work), target, talk.progress_bytes, _write_err if as_json else _write)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show(report, kept=output_dir is not None)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _write_err(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _show(report: QuickstartReport, *, kept: bool) -> None:
    kept_as = f", kept in {report.engine_dir}" if kept else ", removed (keep it with --output_dir)"
    tpot, share = report.tpot_ms, report.bandwidth_fraction
    at_once = "unknown: all tokens came at once; run it again when this machine has less to do"
    read = f"{report.machine_gbs:.1f} GB/s that this machine reads"
    rows = {
        "model": f"{report.model}, {report.precision}",
        "target": f"{report.target}: {report.target_why}",
        "engine": format_bytes(report.engine_bytes) + kept_as,
        "build": f"{report.build_seconds:.2f} s, peak memory {format_bytes(report.peak_memory_bytes)}",
        "load": f"{report.load_ms:.1f} ms",
        "TTFT": f"{report.ttft_ms:.2f} ms for {report.prompt_tokens} prompt tokens",
        "TPOT": f"{tpot:.3f} ms, {1e3 / tpot:.0f} tokens/s, mean of {report.tokens} tokens" if tpot else at_once,
        "bandwidth": f"{share:.0%} of the {read}" if share else read,
    }
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(name, text)
    Console(stderr=True).print(table, highlight=False, markup=False)
