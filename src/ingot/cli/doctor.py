"""`ingot doctor`: what this machine offers."""

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from ingot.cli.values import as_json
from ingot.configs.sizes import format_bytes
from ingot.doctor import EngineState, Machine, examine


@click.command()
@click.argument("engines", nargs=-1, type=click.Path(path_type=Path), metavar="[ENGINE]...")
@as_json
def command(engines: tuple[Path, ...], as_json: bool) -> None:
    """What this machine offers, which targets build and run here, and why not; of every ENGINE the same.

    \b
    Example: ingot doctor engine --json
    """
    machine = examine(engines)
    if as_json:
        print(json.dumps(dataclasses.asdict(machine), indent=1))
    else:
        _show(machine)


def _show(machine: Machine) -> None:
    bandwidth = machine.bandwidth_why_not if machine.bandwidth_gbs is None else f"{machine.bandwidth_gbs:.1f} GB/s read"
    pages = "2 MiB pages" if machine.huge_pages else "no 2 MiB pages (transparent_hugepage is set to never)"
    rows = {
        "CPU": f"{machine.cpu}, {machine.cores} cores for this process",
        "ISA": f"{machine.isa} ({machine.isa_why})",
        "memory": "; ".join(
            (
                f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.available_bytes)} free",
                bandwidth or "",
                pages,
            )
        ),
        "GPUs": ", ".join(machine.gpus) or "none (no NVIDIA driver is loaded)",
        "CUDA": "; ".join(machine.cuda.values()),
        "libraries": ", ".join(
            [
                f"Python {machine.python}",
                *(f"{name} {version}" for name, version in machine.libraries.items() if version),
            ]
        ),
        "not installed": ", ".join(name for name, version in machine.libraries.items() if version is None) or "nothing",
    }
    facts = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        facts.add_row(name, text)
    table = Table("target", "builds here", "runs here", Column("why not", overflow="fold"))
    for target in machine.targets:
        table.add_row(target.name, _yes(target.builds), _yes(target.runs), target.why_not or "")
    console = Console()
    console.print(facts, highlight=False, markup=False)
    console.print(table, highlight=False, markup=False)
    for engine in machine.engines:
        print(f"{engine.directory}: " + (engine.problem or _fate(engine)))
        for line in engine.why_not:
            print(f"  {line}")


def _fate(engine: EngineState) -> str:
    return "runs nowhere here" if engine.takes is None else f"runs here as {engine.takes}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
