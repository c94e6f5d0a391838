"""`ingot bench kernels`: a table per phase, or JSON, on stdout."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ingot.bench.kernels import KernelsOptions, KernelsReport, Phase, bench_kernels
from ingot.cli.console import LEVELS, Talk
from ingot.cli.values import as_json, log_level, positive, target_isa


@click.command()
@click.option("--engine_dir", type=click.Path(path_type=Path), required=True, help="Engine to measure.")
@click.option("--input_len", type=positive, help="Prompt tokens of the prefill phase; 512, or what the engine takes.")
@click.option("--context", type=positive, help="Tokens before a decode step; --input_len unless given.")
@click.option(
    "--batch_size",
    "batch_sizes",
    type=positive,
    multiple=True,
    help="Sequences that decode together; may be given several times. 1, 8 and 32 unless given.",
)
@click.option(
    "--repetitions",
    type=positive,
    default=3,
    show_default=True,
    help="Timed rounds of each phase, at least; short ones are repeated for a second.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random prompts.")
@click.option("--threads", type=positive, help="Threads; every core unless given.")
@target_isa
@as_json
@log_level
def kernels(as_json: bool, log_level: str, batch_sizes: tuple[int, ...], **options: Any) -> None:
    """Time, bytes, operations and bound of every op, in prefill and decode, beside this machine's limits.

    The limits are measured around each phase: memory read from a buffer as large as the engine, and arithmetic on
    random numbers. Activations count as bytes too; where they lie in caches, more than 100 % of the limit is possible.

    \b
    Example: ingot bench kernels --engine_dir ENGINE --input_len 512 --batch_size 1 --batch_size 8
    """
    with Talk(LEVELS[log_level]) as talk:
        asked = KernelsOptions(batch_sizes=batch_sizes or None, **options)
        report = bench_kernels(asked, talk.progress)
        for note in report.notes:
            talk.note(note)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        _show(report)


_HEADS = ("op", "kernel", "calls", "ms", "share", "MB", "Mop", "bound", "limit ms", "of limit")
_NAMES = 2  # columns of words; numbers stand to the right


def _show(report: KernelsReport) -> None:
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    print(f"{report.engine}: {report.precision} for {report.target}, KV cache in {report.kv_dtype}, {threads}")
    for phase in report.phases:
        print()
        print(
            f"{phase.name}: {1e3 * phase.seconds:.3f} ms, {phase.tokens_per_second:,.1f} tokens/s, "
            f"{phase.fraction_of_limit:.0%} of the limit (the fastest quarter of {phase.repetitions}; "
            f"median {1e3 * phase.median_seconds:.3f} ms)"
        )
        print("\n".join(_table(phase)))
        peaks = ", ".join(f"{name} {each / 1e9:,.1f} Gop/s" for name, each in phase.peaks.items())
        print(
            f"limits: {phase.machine_gbs:.2f} GB/s from a buffer of {report.buffer_bytes:,} bytes; {peaks}; "
            f"calls: {' and '.join(each or 'one by one' for each in phase.variants)}; {phase.barriers} barriers, "
            f"{1e3 * phase.barrier_seconds:.3f} ms where nobody is late"
        )


def _table(phase: Phase) -> list[str]:
    rows = [_HEADS]
    for op in phase.ops:
        rows.append(
            (
                op.name,
                op.kernel,
                str(op.calls),
                f"{1e3 * op.seconds:.3f}",
                f"{op.share:.1%}",
                f"{op.nbytes / 1e6:,.2f}",
                f"{op.operations / 1e6:,.1f}",
                op.bound,
                f"{1e3 * op.limit_seconds:.3f}",
                f"{op.fraction_of_limit:.0%}",
            )
        )
    share = phase.outside_seconds / phase.seconds
    rows.append(("outside", "", "", f"{1e3 * phase.outside_seconds:.3f}", f"{share:.1%}", "", "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    return ["  ".join(_padded(row, widths)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    sides = [str.ljust] * _NAMES + [str.rjust] * (len(widths) - _NAMES)
    return [side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)]
