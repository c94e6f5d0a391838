"""`ingot doctor`: what this machine offers."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from ingot.cli.console import wrapped
from ingot.cli.exit_codes import DONE, FAILED
from ingot.cli.values import LocalPath, as_json
from ingot.configs.sizes import format_bytes
from ingot.doctor import EngineState, Machine, TargetState, examine
from ingot.step_table import aligned


@click.command()
@click.argument("engines", nargs=-1, type=LocalPath(path_type=Path), metavar="[ENGINE]...")
@click.option("--all", "everything", is_flag=True, help="Print every target with what is missing for it.")
@as_json
def command(engines: tuple[Path, ...], everything: bool, as_json: bool) -> int:
    """Show what this machine offers, which targets it can build and run, and what the others lack. With ENGINE: show
    which target of the engine this machine would run. The exit code is 1 if it runs none.

    \b
    Example: ingot doctor engine --json
    """
    machine = examine(engines)
    code: int = DONE if all(engine.takes for engine in machine.engines) else FAILED
    if as_json:
        print(json.dumps(dataclasses.asdict(machine), indent=1))
        return code
    for engine in machine.engines:
        print(wrapped("\n".join(_fate(engine))) + "\n")
    print(
        wrapped(
            "\n".join(f"{name:<13}  {text}" for name, text in _machine_info(machine, everything=everything).items())
        )
    )
    print()
    print(_every_target(machine.targets) if everything else wrapped("\n".join(_groups(machine.targets))))
    return code


def _machine_info(machine: Machine, *, everything: bool) -> dict[str, str]:
    bandwidth = machine.bandwidth_why_not if machine.bandwidth_gbs is None else f"{machine.bandwidth_gbs:.1f} GB/s read"
    pages = "2 MiB pages" if machine.huge_pages else "no 2 MiB pages (transparent_hugepage is set to never)"
    memory = f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.available_bytes)} free"
    versions = (f"{name} {version}" for name, version in machine.libraries.items() if version)
    found = {
        "CPU": f"{machine.cpu}, {machine.cores} cores for this process",
        "ISA": f"{machine.isa} ({machine.isa_why})",
        "memory": "; ".join((memory, bandwidth or "", pages)),
        "GPUs": ", ".join(machine.gpus) or "none (no NVIDIA driver is loaded)",
    }
    more = {
        "CUDA": "; ".join(machine.cuda.values()),
        "libraries": ", ".join([f"Python {machine.python}", *versions]),
        "not installed": ", ".join(name for name, version in machine.libraries.items() if version is None) or "nothing",
    }
    return found | more if everything else found


def _groups(targets: Sequence[TargetState]) -> list[str]:
    """Names of the targets by what this machine can do with them; whole families where they share it."""
    kinds: dict[str, list[str]] = {"builds and runs": [], "builds only": [], "runs only": [], "neither": []}
    for target in targets:
        both, one = target.builds and target.runs, "builds only" if target.builds else "runs only"
        kinds["builds and runs" if both else one if target.builds or target.runs else "neither"].append(target.name)
    families = Counter(target.name.split("/")[0] for target in targets)
    lines = [f"{kind:<17}  {', '.join(_short_names(names, families))}" for kind, names in kinds.items() if names]
    return [*lines, "", "`ingot doctor --all` says what is missing for each target."]


def _short_names(names: Sequence[str], families: Mapping[str, int]) -> list[str]:
    """cuda/sm80, cuda/sm90 → cuda/*, if there are no others."""
    here = Counter(name.split("/")[0] for name in names)
    found = (name.split("/")[0] for name in names)
    shared = {family for family in here if here[family] == families[family] > 1}
    return list(dict.fromkeys(f"{each}/*" if each in shared else name for each, name in zip(found, names, strict=True)))


def _every_target(targets: Sequence[TargetState]) -> str:
    """Every target, and each reason once with the targets that it stops."""
    table = aligned(
        [
            ("target", "builds here", "runs here"),
            *((each.name, _yes(each.builds), _yes(each.runs)) for each in targets),
        ],
        words=3,
    )
    reasons: dict[str, list[str]] = {}
    for each in targets:
        if each.why_not is not None:
            reasons.setdefault(each.why_not, []).append(each.name)
    told = (wrapped(f"{', '.join(names)}:\n    {why}") for why, names in reasons.items())
    return "\n\n".join(["\n".join(table), *told])


def _fate(engine: EngineState) -> list[str]:
    """Whether the engine runs here, and why its other targets do not."""
    fate = f"runs here as {engine.takes}; `ingot verify` checks its bytes" if engine.takes else "runs nowhere here"
    parsers = f"tool calls: {engine.tool_parser or 'unknown'}; reasoning: {engine.reasoning_parser or 'none'}"
    told = [*engine.why_not, *([] if engine.problem else [parsers])]
    return [f"{engine.directory}: {engine.problem or fate}", *(f"    {line}" for line in told)]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
