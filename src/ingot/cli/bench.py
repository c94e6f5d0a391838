"""`ingot bench latency | throughput | serve`, as a table or JSON on stdout."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ingot.bench.latency import LatencyOptions, LatencyReport, bench_latency
from ingot.bench.serve import ServeOptions, ServeReport, bench_serve
from ingot.bench.throughput import ThroughputOptions, ThroughputReport, bench_throughput
from ingot.cli.console import LEVELS, Talk
from ingot.cli.values import as_json, log_level, positive, target_isa
from ingot.errors import IngotError

_milliseconds = click.FloatRange(min=0, min_open=True)
_STEADY = 1.15  # a larger drift of the machine's speed is told
_LATER = {
    "kernels": "kernels are not timed alone yet; `ingot inspect ENGINE` lists what each step must read and compute",
}


class _Kinds(click.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LATER:
            raise IngotError(f"ingot bench {cmd_name} does not exist in this version", hint=_LATER[cmd_name])
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Kinds)
def command() -> None:
    """Latency, throughput and goodput of an Engine on this machine.

    \b
    Example: ingot bench latency --engine_dir ENGINE --input_len 128 --output_len 64
    """


def _shared(function: Any) -> Any:
    options = (
        click.option("--engine_dir", type=click.Path(path_type=Path), required=True, help="Engine to measure."),
        click.option("--input_len", type=positive, default=128, show_default=True, help="Prompt tokens per request."),
        click.option(
            "--output_len", type=positive, default=64, show_default=True, help="Generated tokens per request."
        ),
        click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Untimed rounds."),
        click.option(
            "--repetitions", type=positive, default=3, show_default=True, help="Timed rounds; medians are shown."
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random prompts."),
        click.option("--threads", type=positive, help="Threads; every core unless given."),
        target_isa,
        as_json,
        log_level,
    )
    for option in reversed(options):
        function = option(function)
    return function


@command.command()
@click.option("--batch_size", "batch_sizes", type=positive, multiple=True, default=(1,), show_default=True,
              help="Requests at once; may be given several times.")  # fmt: skip
@_shared
def latency(as_json: bool, log_level: str, batch_sizes: tuple[int, ...], **options: Any) -> None:
    """TTFT, TPOT and ITL of batches that start together.

    \b
    Example: ingot bench latency --engine_dir ENGINE --batch_size 1 --batch_size 8 --json
    """
    with Talk(LEVELS[log_level]) as talk:
        report = bench_latency(LatencyOptions(batch_sizes=batch_sizes, **options), talk.progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show_latency(report)


@command.command()
@click.option("--num_requests", type=positive, default=64, show_default=True, help="Requests given at once.")
@click.option("--max_batch_size", type=positive, help="Requests running at once; the engine's limit unless given.")
@_shared
def throughput(as_json: bool, log_level: str, **options: Any) -> None:
    """Requests and tokens per second when there is always work.

    \b
    Example: ingot bench throughput --engine_dir ENGINE --num_requests 64
    """
    with Talk(LEVELS[log_level]) as talk:
        report = bench_throughput(ThroughputOptions(**options), talk.progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show_throughput(report)


@command.command()
@click.option("--offline", is_flag=True, help="Measure the executor in this process, without HTTP.")
@click.option("--engine_dir", type=click.Path(path_type=Path), required=True, help="Engine to measure.")
@click.option("--trace", type=click.Path(path_type=Path), required=True,
              help="CSV: TIMESTAMP,ContextTokens,GeneratedTokens (Azure's traces).")  # fmt: skip
@click.option("--num_requests", type=click.IntRange(min=2), default=100, show_default=True,
              help="The first of the trace.")  # fmt: skip
@click.option("--ttft_ms", type=_milliseconds, default=1000.0, show_default=True, help="A good request's TTFT at most.")
@click.option("--tpot_ms", type=_milliseconds, default=100.0, show_default=True, help="A good request's TPOT at most.")
@click.option("--length_scale", type=click.FloatRange(min=0, min_open=True), default=0.25, show_default=True,
              help="Lengths of the trace times this.")  # fmt: skip
@click.option("--max_input", type=positive, help="Longest prompt (768, or what the engine takes).")
@click.option("--max_output", type=positive, help="Longest answer (256, or what the engine holds).")
@click.option("--poisson", is_flag=True, help="Poisson arrivals instead of the trace's own times.")
@click.option("--start_rate", type=click.FloatRange(min=0, min_open=True),
              help="Requests per second to begin with; half of what the engine can do unless given.")  # fmt: skip
@click.option("--precision", type=click.FloatRange(min=0.01, max=1), default=0.1, show_default=True,
              help="How close the search comes, relatively.")  # fmt: skip
@click.option("--tpot_target", type=_milliseconds, help="Let the runner bound its steps by this many milliseconds.")
@click.option("--max_batch_size", type=positive, help="Requests running at once; the engine's limit unless given.")
@click.option("--max_num_tokens", type=positive, help="Tokens per step; the engine's limit unless given.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts and Poisson gaps.")
@click.option("--threads", type=positive, help="Threads; every core unless given.")
@target_isa
@as_json
@log_level
def serve(offline: bool, as_json: bool, log_level: str, **options: Any) -> None:
    """Goodput: the highest rate at which 90 % of a trace's requests meet both limits, with chunked and mixed steps
    against neither.

    \b
    Example: ingot bench serve --offline --engine_dir ENGINE --trace conv.csv --ttft_ms 500 --tpot_ms 50
    """
    if not offline:
        raise IngotError(
            "ingot bench serve over HTTP does not exist in this version", hint="add --offline: the same loop, no HTTP"
        )
    with Talk(LEVELS[log_level]) as talk:
        report = bench_serve(ServeOptions(**options), talk.progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show_serve(report)


def _show_latency(report: LatencyReport) -> None:
    title = f"{report.engine}: {report.input_len} tokens in, {report.output_len} out, {report.repetitions} repetitions"
    table = Table("batch", "TTFT ms", "TPOT ms", "tokens/s", "GB/s read", "of this machine", title=title)
    for batch in report.batches:
        table.add_row(
            str(batch.batch_size),
            f"{batch.ttft_ms:.2f}",
            "" if batch.tpot_ms is None else f"{batch.tpot_ms:.3f}",
            f"{batch.tokens_per_second:.1f}",
            "" if batch.bandwidth_gbs is None else f"{batch.bandwidth_gbs:.2f}",
            "" if batch.bandwidth_fraction is None else f"{batch.bandwidth_fraction:.0%}",
        )
    Console().print(table)
    print(f"this machine reads {report.machine_gbs:.2f} GB/s from a buffer of {report.buffer_bytes:,} bytes")


def _show_throughput(report: ThroughputReport) -> None:
    title = f"{report.engine}: {report.num_requests} requests, {report.input_len} tokens in, {report.output_len} out"
    table = Table("", "median", title=title)
    table.add_row("seconds", f"{report.seconds:.3f}")
    table.add_row("requests/s", f"{report.requests_per_second:.2f}")
    table.add_row("output tokens/s", f"{report.output_tokens_per_second:.1f}")
    table.add_row("all tokens/s", f"{report.total_tokens_per_second:.1f}")
    table.add_row("steps", str(report.steps))
    table.add_row("TTFT ms", f"{report.ttft_ms_median:.1f}")
    table.add_row("TPOT ms", "" if report.tpot_ms_median is None else f"{report.tpot_ms_median:.3f}")
    table.add_row("outside kernels", f"{report.host_fraction:.1%}")
    table.add_row("GB/s read", f"{report.bandwidth_gbs:.2f} ({report.bandwidth_fraction:.0%} of this machine)")
    Console().print(table)


def _show_serve(report: ServeReport) -> None:
    title = (
        f"{report.engine}: {report.num_requests} requests of {report.trace}, {report.input_len_mean:.0f} tokens in, "
        f"{report.output_len_mean:.0f} out; TTFT <= {report.ttft_ms:g} ms, TPOT <= {report.tpot_ms:g} ms"
    )
    table = Table("steps", "requests/s", "good", "TTFT ms p50, p90", "TPOT ms p50, p90", "mixed steps", title=title)
    for mode in report.modes:
        for run in sorted(mode.rates, key=lambda run: run.rate):
            table.add_row(
                mode.mode.replace("_", ", "),
                f"{run.rate:.3f}",
                f"{run.good_share:.0%}" if run.complete else "given up",
                ", ".join("" if value is None else f"{value:.0f}" for value in (run.ttft_ms_p50, run.ttft_ms_p90)),
                ", ".join("" if value is None else f"{value:.1f}" for value in (run.tpot_ms_p50, run.tpot_ms_p90)),
                f"{run.mixed_steps} of {run.steps}",
            )
    Console().print(table)
    for mode in report.modes:
        before, after = mode.saturated
        print(
            f"goodput, {mode.mode.replace('_', ', ')}: {mode.goodput:.3f} requests/s "
            f"(all at once: {before:.3f} before, {after:.3f} after)"
        )
    if report.ratio is not None:
        print(f"ratio: {report.ratio:.2f}")
    if report.drift > _STEADY:
        print(f"the machine's speed changed {report.drift:.2f} times meanwhile: measure again when it is quiet")
