"""`ingot plan`: a table of arrangements or JSON on stdout."""

import dataclasses
import json
from pathlib import Path

import click

from ingot.cli.console import LEVELS, CliConsole, wrapped
from ingot.cli.values import LocalPath, as_json, log_level, positive
from ingot.dtypes import PRECISIONS
from ingot.errors import UsageError
from ingot.planner.arrange import Arrangement
from ingot.planner.device import read_devices
from ingot.planner.make_plan import PRECISIONS as TRIED
from ingot.planner.make_plan import PlanOptions, PlanReport, make_plan
from ingot.planner.plot import plot
from ingot.plotting import check_plotting
from ingot.step_table import aligned

_RATES = 12  # of a plot, for each arrangement
_above_zero = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option(
    "--checkpoint_dir", type=LocalPath(path_type=Path), required=True, help="Plan for the model of this Checkpoint."
)
@click.option(
    "--devices",
    required=True,
    metavar="FILE|NAMES",
    help="Plan for these devices: a TOML file, or names such as h100,l4 (docs/gpu.md lists the GPUs). The name `here` "
    "is this machine.",
)
@click.option(
    "--count", type=positive, default=1, show_default=True, help="Plan for this many devices, all of the same kind."
)
@click.option("--input_len", type=positive, required=True, help="Plan for prompts of this many tokens.")
@click.option("--output_len", type=positive, required=True, help="Plan for answers of this many tokens.")
@click.option("--rate", type=_above_zero, help="Serve this many requests per second on all devices together.")
@click.option("--ttft", type=_above_zero, metavar="MS", help="Goal: this many ms to the first token.")
@click.option("--tpot", type=_above_zero, metavar="MS", help="Goal: this many ms per token after the first.")
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(PRECISIONS),
    multiple=True,
    help=f"Try this precision. Give it again for more. Default: {', '.join(TRIED)}.",
)
@click.option(
    "--simulated_seconds",
    type=_above_zero,
    help="Simulate this many seconds of requests on all replicas of the best arrangement. Needs --rate. Default: some "
    "requests on one replica of the three best arrangements.",
)
@click.option(
    "--plot",
    "plot_file",
    type=LocalPath(path_type=Path),
    metavar="PNG",
    help="Simulate the best arrangements at several rates too, and write a plot of TTFT, TPOT and cost over the rate "
    "to this PNG file.",
)
@as_json
@log_level
def command(
    checkpoint_dir: Path,
    devices: str,
    count: int,
    input_len: int,
    output_len: int,
    rate: float | None,
    ttft: float | None,
    tpot: float | None,
    precisions: tuple[str, ...],
    simulated_seconds: float | None,
    plot_file: Path | None,
    as_json: bool,
    log_level: str,
) -> None:
    """Estimate TTFT, TPOT, tokens per second and cost of a model, for each way to divide it among devices: replicas,
    ranks, pipeline stages, and prompts on other servers.

    Nothing is run on the devices, and no engine is written: the builder decides the plan of each arrangement, and a
    formula says how long its steps take. The three best arrangements are simulated with the real scheduler. How far
    estimates are off: docs/how-to/plan.md.

    \b
    Example: ingot plan --checkpoint_dir DIR --devices h100,l4 --input_len 1000 --output_len 500
    Example: ingot plan --checkpoint_dir DIR --devices FILE --input_len 99 --output_len 20 --tpot 50
    """
    if simulated_seconds is not None and rate is None:
        raise UsageError("--simulated_seconds needs --rate", hint="add --rate with the requests of a second")
    if plot_file is not None:
        check_plotting(plot_file)
    options = PlanOptions(
        checkpoint_dir=checkpoint_dir,
        devices=tuple(read_devices(devices)),
        input_len=input_len,
        output_len=output_len,
        count=count,
        rate=rate,
        ttft=None if ttft is None else 1e-3 * ttft,
        tpot=None if tpot is None else 1e-3 * tpot,
        precisions=precisions or TRIED,
        simulated_seconds=simulated_seconds,
        rates=_RATES if plot_file is not None else 0,
    )
    with CliConsole(LEVELS[log_level]) as console:
        report = make_plan(options, console.progress)
        if plot_file is not None:
            plot(report, options, plot_file)
            console.note(f"wrote the plot to {plot_file}")
    if as_json:
        print(json.dumps({**_asked(options), **dataclasses.asdict(report)}, indent=1))
    else:
        _show(report)


def _asked(options: PlanOptions) -> dict[str, object]:
    """What the estimate rests on."""
    return {"devices": [dataclasses.asdict(each) for each in options.devices]}


def _show(report: PlanReport) -> None:
    rows: list[tuple[str, ...]] = [
        (
            "device",
            "precision",
            "tp",
            "pp",
            "replicas",
            "batch",
            "TTFT ms",
            "TPOT ms",
            "tokens/s",
            "cost/M",
            "bound",
            "",
        )
    ]
    rows += [_row(each) for each in report.arrangements]
    print("\n".join(aligned(rows, words=2)))
    for each in report.arrangements:
        if each.simulation is not None:
            print(wrapped(_simulated(each)))
    for line in report.left_out:
        print(wrapped(f"not possible: {line}"))
    print(wrapped("an estimate: nothing ran on these devices"))


def _row(each: Arrangement) -> tuple[str, ...]:
    return (
        each.device,
        each.precision,
        str(each.tp),
        str(each.pp),
        f"{each.prefill_replicas}+{each.replicas}" if each.prefill_replicas else str(each.replicas),
        str(each.batch),
        f"{each.ttft_ms:,.1f}",
        f"{each.tpot_ms:,.2f}",
        f"{each.output_tokens_per_second:,.0f}",
        "" if each.cost is None else f"{each.cost:,.2f}",
        each.bound,
        "" if each.meets else "misses the goals",
    )


def _simulated(each: Arrangement) -> str:
    found = each.simulation
    assert found is not None, "the caller looked"
    tpot = "" if found.tpot_ms_p50 is None else f", TPOT {found.tpot_ms_p50:,.2f} and {found.tpot_ms_p90:,.2f}"
    apart = f" beside {each.prefill_replicas} for prompts" if each.prefill_replicas else ""
    return (
        f"simulated {each.device}, {each.precision}, tp {each.tp}, pp {each.pp}: TTFT p50 and p90 "
        f"{found.ttft_ms_p50:,.1f} and {found.ttft_ms_p90:,.1f} ms{tpot}, {found.output_tokens_per_second:,.0f} "
        f"tokens/s, {found.requests:,} requests on {found.replicas} of {each.replicas} replicas{apart}, "
        f"{found.preemptions} preemptions, {found.steps:,} steps in {found.seconds:,.1f} s"
    )
