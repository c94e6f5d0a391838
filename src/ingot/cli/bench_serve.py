"""`ingot bench serve`: goodput of an engine in this process, or load on a server over HTTP."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from ingot.bench.load_test import OnlineOptions, OnlineReport, Percentiles, bench_online
from ingot.bench.plot import plot
from ingot.bench.serve import GOOD_SHARE, ServeOptions, ServeReport, bench_serve
from ingot.cli.console import LEVELS, CliConsole, wrapped
from ingot.cli.values import LocalPath, as_json, log_level, positive, target_isa
from ingot.errors import UsageError
from ingot.plotting import check_plotting
from ingot.step_table import aligned

_milliseconds = click.FloatRange(min=0, min_open=True)
_above_zero = click.FloatRange(min=0, min_open=True)
_STEADY = 1.15  # a larger drift of the machine's speed is told
_OFFLINE = (
    "engine_dir",
    "start_rate",
    "rate_precision",
    "tpot_target",
    "max_batch_size",
    "max_num_tokens",
    "threads",
    "isa",
    "target",
)
_ONLINE = (
    "url",
    "model",
    "api_key",
    "chat",
    "rates",
    "concurrencies",
    "input_len",
    "output_len",
    "ignore_eos",
    "temperature",
    "timeout",
    "plot_file",
)


@click.command()
@click.option("--url", help="Put load on the OpenAI-compatible server at this address.")
@click.option(
    "--offline",
    is_flag=True,
    help="Run the engine in this process, without a server or HTTP, and search for the highest rate that meets both "
    "limits. Needs --engine_dir and --trace.",
)
@click.option(
    "--trace",
    type=LocalPath(path_type=Path),
    help="Replay a trace. CSV: TIMESTAMP,ContextTokens,GeneratedTokens (Azure's traces); or JSONL: "
    "arrival, input_len, output_len.",
)
@click.option(
    "--num_requests",
    type=click.IntRange(min=2),
    default=100,
    show_default=True,
    help="Send this many requests per run: the first ones of the trace.",
)
@click.option(
    "--ttft_ms",
    type=_milliseconds,
    default=1000.0,
    show_default=True,
    help="Count a request as good if its TTFT is at most this.",
)
@click.option(
    "--tpot_ms",
    type=_milliseconds,
    default=100.0,
    show_default=True,
    help="Count a request as good if its TPOT is at most this.",
)
@click.option(
    "--length_scale",
    type=_above_zero,
    default=0.25,
    show_default=True,
    help="Multiply the trace's prompt and answer lengths by this.",
)
@click.option(
    "--max_input",
    type=positive,
    help="Clip prompts to this many tokens. Default with --offline: 768, or the engine's limit if that is less; with "
    "--url: no clipping.",
)
@click.option(
    "--max_output",
    type=positive,
    help="Clip answers to this many tokens. Default with --offline: 256, or the engine's limit if that is less; with "
    "--url: no clipping.",
)
@click.option(
    "--poisson", is_flag=True, help="Let requests arrive at random (Poisson) instead of at the trace's own times."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed the prompts and the Poisson arrivals.",
)
@click.option(
    "--rate",
    "rates",
    type=_above_zero,
    multiple=True,
    help="With --url: send this many requests per second (open loop). Give it again for more runs.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    type=positive,
    multiple=True,
    help="With --url: keep this many requests running (closed loop). Give it again for more runs.",
)
@click.option("--model", help="With --url: ask for this model. Default: the first that the server lists.")
@click.option("--api_key", help="With --url: send this key.")
@click.option("--chat", is_flag=True, default=None, help="With --url: ask for chat completions instead of completions.")
@click.option(
    "--input_len",
    type=positive,
    help="With --url and without --trace: send prompts of about this many tokens. Default: 128.",
)
@click.option(
    "--output_len", type=positive, help="With --url and without --trace: ask for at most this many tokens. Default: 64."
)
@click.option(
    "--ignore_eos",
    is_flag=True,
    default=None,
    help="With --url: continue answers after end tokens, to exactly --output_len; not every server can do that.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="With --url: send this temperature with every request. Default: 0.",
)
@click.option(
    "--timeout", type=_above_zero, help="With --url: give up a request after this many seconds. Default: 600."
)
@click.option(
    "--plot",
    "plot_file",
    type=LocalPath(path_type=Path),
    metavar="PNG",
    help="With --url: write a plot of the latencies to this PNG file.",
)
@click.option("--engine_dir", type=LocalPath(path_type=Path), help="With --offline: measure this Engine.")
@click.option(
    "--start_rate",
    type=_above_zero,
    help="With --offline: begin the search at this many requests per second. Default: half of what the "
    "engine can compute.",
)
@click.option(
    "--rate_precision",
    type=click.FloatRange(min=0.01, max=1),
    help="With --offline: end the search when the rate is known to within this share (0.1 means 10 %).",
)
@click.option(
    "--tpot_target",
    type=_milliseconds,
    help="With --offline: aim at this time per output token, in ms, as `ingot serve --tpot_target`.",
)
@click.option(
    "--max_batch_size",
    type=positive,
    help="With --offline: run at most this many requests at once. Default: the engine's limit.",
)
@click.option(
    "--max_num_tokens",
    type=positive,
    help="With --offline: compute at most this many tokens per step. Default: as `ingot serve`.",
)
@click.option(
    "--threads",
    type=positive,
    help="With --offline: use this many threads. Default: one for each core that the process may use.",
)
@target_isa
@as_json
@log_level
def serve(offline: bool, as_json: bool, log_level: str, **options: Any) -> int:
    """Measure how an engine serves many requests.

    With --url: send load to a server, and report the TTFT, TPOT and ITL that its clients see, and its goodput. Before
    the first run a few requests find out how many tokens a word has.

    With --offline: find the highest rate at which 90 % of a trace's requests meet both limits, with and without chunked
    and mixed steps.

    \b
    Example: ingot bench serve --url http://127.0.0.1:8000 --rate 4 --plot latency.png
    Example: ingot bench serve --offline --engine_dir ENGINE --trace conv.csv --tpot_ms 50
    """
    if offline == (options["url"] is not None):
        raise UsageError(
            "--url and --offline cannot be combined" if offline else "neither --url nor --offline is given",
            expected="--url URL, or --offline --engine_dir ENGINE --trace FILE",
        )
    given = {name: value for name, value in options.items() if value not in (None, ())}
    for name in _ONLINE if offline else _OFFLINE:
        if name in given:
            raise UsageError(f"--{name.removesuffix('_file')} works only with {'--url' if offline else '--offline'}")
    with CliConsole(LEVELS[log_level]) as console:
        report = _online(given, console) if options["url"] else _offline(given, console)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    elif isinstance(report, OnlineReport):
        _show_online(report)
    else:
        _show_offline(report)
    return int(isinstance(report, OnlineReport) and any(run.failed == run.requests for run in report.runs))


def _online(given: dict[str, Any], console: CliConsole) -> OnlineReport:
    target = given.pop("plot_file", None)
    if target is not None:
        check_plotting(target)
    report = bench_online(OnlineOptions(**given), console.progress)
    if target is not None:
        plot(report, target)
        console.note(f"wrote the plot to {target}")
    return report


def _offline(given: dict[str, Any], console: CliConsole) -> ServeReport:
    for name in ("engine_dir", "trace"):
        if name not in given:
            raise UsageError(f"--offline needs --{name}")
    return bench_serve(ServeOptions(**given), console.progress)


def _show_online(report: OnlineReport) -> None:
    print(wrapped(f"{report.model} at {report.url}; good: {_limits(report.ttft_ms, report.tpot_ms)}"))
    for run in report.runs:
        failed = f", {run.failed} of {run.requests} failed" if run.failed else ""
        print(f"\n{run.load}{failed}")
        print(f"  {run.requests_per_second:.2f} requests/s, {run.output_tokens_per_second:,.1f} tokens/s")
        print(f"  good {run.good_share:.0%}, {run.good_requests_per_second:.3f} good requests/s")
        named = (("TTFT", run.ttft), ("TPOT", run.tpot), ("ITL", run.itl))
        rows = [(name, *_percentiles(values), "") for name, values in named if values is not None]
        if rows:
            print("\n".join(f"  {line}" for line in aligned([("ms", "p50", "p90", "p99", ""), *rows], words=1)))
        for words, count in run.errors.items():
            print(f"  {count} times: {words}")
    if report.goodput is not None:
        print(f"\ngoodput: {report.goodput:g} requests/s, the highest --rate with at least {GOOD_SHARE:.0%} good")


def _limits(ttft_ms: float, tpot_ms: float) -> str:
    return f"TTFT <= {ttft_ms:g} ms, TPOT <= {tpot_ms:g} ms"


def _percentiles(values: Percentiles) -> tuple[str, str, str]:
    return f"{values.p50:.1f}", f"{values.p90:.1f}", f"{values.p99:.1f}"


def _show_offline(report: ServeReport) -> None:
    print(
        wrapped(
            f"{report.engine}: {report.num_requests} requests of {report.trace}, {report.input_len_mean:.0f} tokens "
            f"in, {report.output_len_mean:.0f} out; good: {_limits(report.ttft_ms, report.tpot_ms)}"
        )
    )
    for mode in report.modes:
        rows: list[tuple[str, ...]] = [
            ("requests/s", "good", "TTFT p50", "p90 ms", "TPOT p50", "p90 ms", "mixed steps", "")
        ]
        rows += [
            (
                f"{run.rate:.3f}",
                f"{run.good_share:.0%}" if run.complete else "given up",
                *("" if value is None else f"{value:.0f}" for value in (run.ttft_ms_p50, run.ttft_ms_p90)),
                *("" if value is None else f"{value:.1f}" for value in (run.tpot_ms_p50, run.tpot_ms_p90)),
                f"{run.mixed_steps} of {run.steps}",
                "",
            )
            for run in sorted(mode.rates, key=lambda run: run.rate)
        ]
        before, after = mode.saturated
        print(f"\n{mode.mode.replace('_', ', ')}")
        print("\n".join(f"  {line}" for line in aligned(rows, words=0)))
        print(
            f"  goodput: {mode.goodput:.3f} requests/s, the highest rate with at least {GOOD_SHARE:.0%} good\n"
            f"  all requests at once: {before:.3f} requests/s before, {after:.3f} after"
        )
    if report.ratio is not None:
        print(f"ratio: {report.ratio:.2f}")
    if report.drift > _STEADY:
        print(f"the machine's speed changed {report.drift:.2f} times meanwhile: measure again when it is quiet")
