"""`ingot bench start`: a table or JSON on stdout."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from ingot.bench.cold_start import StartOptions, StartReport, bench_start
from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.values import LocalPath, as_json, log_level, positive, target_isa, use_mmap


@click.command()
@click.option("--engine_dir", type=LocalPath(path_type=Path), required=True, help="Measure this Engine.")
@click.option("--input_len", type=positive, default=32, show_default=True, help="Give a prompt of this many tokens.")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Start this many untimed processes first, so that the engine's files are in the page cache.",
)
@click.option(
    "--repetitions", type=positive, default=5, show_default=True, help="Time this many processes and show medians."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed the random prompts.")
@click.option(
    "--threads", type=positive, help="Use this many threads. Default: one for each core that the process may use."
)
@use_mmap
@target_isa
@as_json
@log_level
def start(as_json: bool, log_level: str, **options: Any) -> None:
    """Measure the time from the start of a process to its first token, and its memory.

    \b
    Example: ingot bench start --engine_dir ENGINE --input_len 32
    """
    with CliConsole(LEVELS[log_level]) as console:
        report = bench_start(StartOptions(**options), console.progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show(report)


def _show(report: StartReport) -> None:
    print(
        f"{report.engine} on {report.target}: first token of a prompt of {report.input_len} after "
        f"{report.total_ms:.0f} ms, median of {report.repetitions} starts"
    )
    parts = (
        ("Python", report.interpreter_ms),
        ("imports", report.import_ms),
        ("open and check", report.open_ms),
        ("prefill and draw", report.first_token_ms),
    )
    for name, milliseconds in parts:
        print(f"  {name:<16} {milliseconds:8.1f} ms")
    peak, beside = report.peak_bytes / 2**20, report.beside_bytes / 2**20
    print(f"memory: {peak:.0f} MiB at its peak, {beside:.0f} MiB without the weights")
