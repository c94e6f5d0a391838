"""`ingot bench latency | throughput | serve | kernels | start`, as a table or JSON on stdout."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ingot.bench.latency import LatencyOptions, LatencyReport, bench_latency
from ingot.bench.throughput import ThroughputOptions, ThroughputReport, bench_throughput
from ingot.cli.bench_kernels import kernels
from ingot.cli.bench_serve import serve
from ingot.cli.bench_start import start
from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.values import LocalPath, as_json, log_level, positive, target_isa, use_mmap
from ingot.configs.sampling import SamplingParams


@click.group()
def command() -> None:
    """Measure latency, throughput, goodput, kernel times or cold starts of an Engine.

    \b
    Example: ingot bench latency --engine_dir ENGINE --input_len 128 --output_len 64
    """


_THREADS = "Use this many threads. Default: one for each core that the process may use."


def _shared(function: Any) -> Any:
    options = (
        click.option("--engine_dir", type=LocalPath(path_type=Path), required=True, help="Measure this Engine."),
        click.option(
            "--input_len", type=positive, default=128, show_default=True, help="Prompt with this many tokens."
        ),
        click.option(
            "--output_len", type=positive, default=64, show_default=True, help="Generate this many tokens per request."
        ),
        click.option(
            "--warmup",
            type=click.IntRange(min=0),
            default=1,
            show_default=True,
            help="Run this many untimed rounds first.",
        ),
        click.option(
            "--repetitions", type=positive, default=3, show_default=True, help="Time this many rounds and show medians."
        ),
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed the random prompts."
        ),
        click.option(
            "--temperature",
            type=float,
            default=0.0,
            show_default=True,
            help="Divide the logits by this before sampling; 0 is greedy.",
        ),
        click.option(
            "--top_k", type=int, default=0, show_default=True, help="Sample from the k most likely tokens; 0 keeps all."
        ),
        click.option(
            "--top_p",
            type=float,
            default=1.0,
            show_default=True,
            help="Sample from the smallest set of likely tokens whose probability reaches this.",
        ),
        click.option(
            "--repetition_penalty",
            type=float,
            default=1.0,
            show_default=True,
            help="Make earlier tokens less likely: divide their positive logits by this, multiply their negative ones. "
            "1 changes nothing.",
        ),
        click.option(
            "--logprobs", type=int, help="Return the log probabilities of this many likely tokens beside each token."
        ),
        click.option("--threads", type=positive, help=_THREADS),
        use_mmap,
        target_isa,
        as_json,
        log_level,
    )
    for option in reversed(options):
        function = option(function)
    return function


def _with_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The options with those of the draws as one."""
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "logprobs")
    sampling = SamplingParams(**{name: options.pop(name) for name in names})
    return {**options, "sampling": sampling}


@command.command()
@click.option(
    "--batch_size",
    "batch_sizes",
    type=positive,
    multiple=True,
    default=(1,),
    show_default=True,
    help="Run this many requests at once. Give the option again for more batch sizes.",
)
@_shared
def latency(as_json: bool, log_level: str, batch_sizes: tuple[int, ...], **options: Any) -> None:
    """Measure TTFT, TPOT and ITL of requests that start together.

    \b
    Example: ingot bench latency --engine_dir ENGINE --batch_size 1 --batch_size 8 --json
    """
    with CliConsole(LEVELS[log_level]) as console:
        report = bench_latency(LatencyOptions(batch_sizes=batch_sizes, **_with_sampling(options)), console.progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show_latency(report)


@command.command()
@click.option(
    "--num_requests", type=positive, default=64, show_default=True, help="Submit this many requests together."
)
@click.option(
    "--max_batch_size", type=positive, help="Run at most this many requests at once. Default: the engine's limit."
)
@_shared
def throughput(as_json: bool, log_level: str, **options: Any) -> None:
    """Measure requests and tokens per second when many requests wait.

    \b
    Example: ingot bench throughput --engine_dir ENGINE --num_requests 64
    """
    with CliConsole(LEVELS[log_level]) as console:
        report = bench_throughput(ThroughputOptions(**_with_sampling(options)), console.progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show_throughput(report)


command.add_command(serve)
command.add_command(kernels)
command.add_command(start)


def _show_latency(report: LatencyReport) -> None:
    lengths = f"{report.input_len} tokens in, {report.output_len} out"
    title = f"{report.engine} on {report.target}: {lengths}, {report.repetitions} repetitions"
    table = Table("batch", "TTFT ms", "TPOT ms", "tokens/s", "GB/s read", "of the limit")
    print(title)
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
    print(
        f"limit: {report.machine_gbs:.2f} GB/s, which this machine reads from a buffer as large as the weights "
        f"({report.buffer_bytes:,} bytes)"
    )


def _show_throughput(report: ThroughputReport) -> None:
    lengths = f"{report.input_len} tokens in, {report.output_len} out"
    title = f"{report.engine} on {report.target}: {report.num_requests} requests, {lengths}"
    print(title)
    table = Table("", "median")
    table.add_row("seconds", f"{report.seconds:.3f}")
    table.add_row("requests/s", f"{report.requests_per_second:.2f}")
    table.add_row("output tokens/s", f"{report.output_tokens_per_second:.1f}")
    table.add_row("all tokens/s", f"{report.total_tokens_per_second:.1f}")
    table.add_row("steps", str(report.steps))
    table.add_row("TTFT ms", f"{report.ttft_ms_median:.1f}")
    table.add_row("TPOT ms", "" if report.tpot_ms_median is None else f"{report.tpot_ms_median:.3f}")
    table.add_row("outside kernels", f"{report.host_fraction:.1%}")
    table.add_row("GB/s read", f"{report.bandwidth_gbs:.2f} ({report.bandwidth_fraction:.0%} of the limit)")
    Console().print(table)
