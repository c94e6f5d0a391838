"""`ingot bench kernels`: a table per phase, or JSON, on stdout."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ingot.bench.kernels import KernelsOptions, KernelsReport, OpTimes, Phase, bench_kernels
from ingot.cli.console import LEVELS, CliConsole, wrapped
from ingot.cli.values import LocalPath, as_json, log_level, positive, target_isa
from ingot.step_table import aligned


@click.command(short_help="Time every op, and compare it with the limits of this machine.")
@click.option("--engine_dir", type=LocalPath(path_type=Path), required=True, help="Measure this Engine.")
@click.option(
    "--input_len",
    type=positive,
    help="Prefill this many tokens. Default: 512, or the engine's max_input_len if that is less.",
)
@click.option("--context", type=positive, help="Decode after this many tokens. Default: --input_len.")
@click.option(
    "--batch_size",
    "batch_sizes",
    type=positive,
    multiple=True,
    help="Decode this many sequences together. Give the option again for more batch sizes. Default: 1, 8 and 32.",
)
@click.option(
    "--repetitions",
    type=positive,
    default=3,
    show_default=True,
    help="Time each phase at least this many times; short phases are repeated for a second.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed the random prompts.")
@click.option(
    "--threads", type=positive, help="Use this many threads. Default: one for each core that the process may use."
)
@click.option(
    "--all", "everything", is_flag=True, help="Print every column, also if rows become wider than the terminal."
)
@target_isa
@as_json
@log_level
def kernels(everything: bool, as_json: bool, log_level: str, batch_sizes: tuple[int, ...], **options: Any) -> None:
    """Time every op in prefill and decode, and compare it with the limits of this machine.

    The limits are measured around each phase: memory read from a buffer as large as the engine, and arithmetic on
    random numbers. Activations count as bytes too, so an op whose data lie in a CPU cache can exceed 100 %.

    With several ranks, ops and limits are those of rank 0. The time of a
    collective includes the wait for the other ranks, which do nothing while the limits are measured.

    \b
    Example: ingot bench kernels --engine_dir ENGINE --input_len 512 --batch_size 1 --batch_size 8
    """
    with CliConsole(LEVELS[log_level]) as console:
        asked = KernelsOptions(batch_sizes=batch_sizes or None, **options)
        report = bench_kernels(asked, console.progress)
        for note in report.notes:
            console.note(note)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show(report, everything=everything)


def _show(report: KernelsReport, *, everything: bool) -> None:
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    if report.ranks > 1:
        threads = f"rank 0 of {report.ranks}, {threads} each"
    print(wrapped(f"{report.engine}: {report.precision} for {report.target}, KV cache in {report.kv_dtype}, {threads}"))
    for phase in report.phases:
        print()
        print(
            wrapped(
                f"{phase.name}: {1e3 * phase.seconds:.3f} ms, {phase.tokens_per_second:,.1f} tokens/s, "
                f"{phase.fraction_of_limit:.0%} of the limit (the fastest quarter of {phase.repetitions}; "
                f"median {1e3 * phase.median_seconds:.3f} ms)"
            )
        )
        print("\n".join(_whole_table(phase) if everything else _short_table(phase)))
        peaks = ", ".join(f"{name} {each / 1e9:,.1f} Gop/s" for name, each in phase.peaks.items())
        print(
            wrapped(
                f"limits of this machine: {phase.machine_gbs:.2f} GB/s (a buffer of {report.buffer_bytes:,} bytes), "
                f"{peaks}\n"
                f"{phase.barriers} barriers take {1e3 * phase.barrier_seconds:.3f} ms if no thread is late; "
                f"variant of the plan: {' and '.join(each or 'one by one' for each in phase.variants)}"
            )
        )
    if not everything:
        print(wrapped("\nof limit: how near an op comes to what this machine allows. --all adds columns"))


def _short_table(phase: Phase) -> list[str]:
    """In 80 columns; kernels without the instruction set that most have."""
    usual = Counter(op.kernel.partition(".")[2].rpartition(".")[2] for op in phase.ops).most_common(1)[0][0]
    rows = [("op", "kernel", "ms", "share", "MB", "of limit", "bound")]
    rows += [
        (op.name, op.kernel.removesuffix(f".{usual}"), *_times(op), f"{op.nbytes / 1e6:,.2f}", *_limit(op))
        for op in phase.ops
    ]
    rows.append(("outside", "", *_outside(phase), "", "", ""))
    return aligned(rows, words=2)


def _whole_table(phase: Phase) -> list[str]:
    rows = [("op", "kernel", "calls", "ms", "share", "MB", "Mop", "limit ms", "of limit", "bound")]
    for op in phase.ops:
        sizes = (f"{op.nbytes / 1e6:,.2f}", f"{op.operations / 1e6:,.1f}", f"{1e3 * op.limit_seconds:.3f}")
        rows.append((op.name, op.kernel, str(op.calls), *_times(op), *sizes, *_limit(op)))
    rows.append(("outside", "", "", *_outside(phase), "", "", "", "", ""))
    return aligned(rows, words=2)


def _times(op: OpTimes) -> tuple[str, str]:
    return f"{1e3 * op.seconds:.3f}", f"{op.share:.1%}"


def _limit(op: OpTimes) -> tuple[str, str]:
    return f"{op.fraction_of_limit:.0%}", op.bound


def _outside(phase: Phase) -> tuple[str, str]:
    return f"{1e3 * phase.outside_seconds:.3f}", f"{phase.outside_seconds / phase.seconds:.1%}"
