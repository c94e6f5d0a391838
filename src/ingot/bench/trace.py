"""A recorded trace of requests (Azure's CSV: TIMESTAMP,ContextTokens,GeneratedTokens) → lengths and arrival times."""

import csv
import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.errors import UsageError

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MICROSECONDS = 26  # characters of "2023-11-16 18:15:46.680590"; the trace has one digit more


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """arrival: seconds after the first row's."""

    arrival: float
    input_len: int
    output_len: int


def read_trace(path: Path, count: int) -> list[TraceRow]:
    """The first `count` rows. Raises UsageError."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if not set(_COLUMNS) <= set(reader.fieldnames or ()):
                raise UsageError("the trace lacks columns", where=str(path), expected=",".join(_COLUMNS),
                                 got=",".join(reader.fieldnames or ()))  # fmt: skip
            read = [_read_row(row, f"{path}:{line}") for line, row in zip(range(2, count + 2), reader, strict=False)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError("the trace cannot be read", where=str(path), got=str(error)) from error
    if len(read) < count:
        raise UsageError("the trace has too few requests", where=str(path), expected=str(count), got=str(len(read)))
    first = read[0][0]
    times = [(when - first).total_seconds() for when, _, _ in read]
    if times != sorted(times):
        raise UsageError("the trace is not in order of time", where=str(path))
    return [
        TraceRow(arrival=time, input_len=context, output_len=generated)
        for time, (_, context, generated) in zip(times, read, strict=True)
    ]


def scale_lengths(rows: Sequence[TraceRow], scale: float, max_input: int, max_output: int) -> list[TraceRow]:
    """Lengths times `scale`, at least 1 and at most the maxima."""

    def scaled(length: int, most: int) -> int:
        return min(max(round(length * scale), 1), most)

    return [
        dataclasses.replace(
            row, input_len=scaled(row.input_len, max_input), output_len=scaled(row.output_len, max_output)
        )
        for row in rows
    ]


def arrivals_at(rows: Sequence[TraceRow], rate: float, *, poisson: bool, seed: int) -> list[float]:
    """When each request arrives, in seconds from the first, at `rate` requests per second on average.

    The trace's own times, or exponential gaps, stretched by one factor so that all have arrived after (n - 1) / rate.
    """
    times = np.array([row.arrival for row in rows])
    if poisson:
        times = np.concatenate([[0.0], np.cumsum(np.random.default_rng(seed).exponential(size=len(rows) - 1))])
    natural = times[-1]
    stretched: list[float] = (times * ((len(rows) - 1) / rate / natural) if natural else times).tolist()
    return stretched


def _read_row(row: dict[str, str], where: str) -> tuple[datetime.datetime, int, int]:
    try:
        when = datetime.datetime.fromisoformat(row["TIMESTAMP"][:_MICROSECONDS])
        context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (ValueError, TypeError) as error:
        raise UsageError("a row of the trace cannot be read", where=where, got=str(error)) from error
    if context < 1 or generated < 1:
        raise UsageError("a row of the trace has no tokens", where=where, got=f"{context}, {generated}")
    return when, context, generated
