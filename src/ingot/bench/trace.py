"""A recorded trace of requests → lengths and arrival times.

CSV     TIMESTAMP,ContextTokens,GeneratedTokens, as Azure publishes them
JSONL   {"arrival": seconds, "input_len": tokens, "output_len": tokens}
"""

import csv
import dataclasses
import datetime
import json
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
        rows = _read_lines(path, count) if path.suffix in (".jsonl", ".json") else _read_csv(path, count)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            "the trace cannot be read", where=str(path), expected="a file .csv or .jsonl in UTF-8", got=str(error)
        ) from error
    if len(rows) < count:
        raise UsageError(
            "the trace has too few requests",
            where=str(path),
            expected=str(count),
            got=str(len(rows)),
            hint=f"give --num_requests {len(rows)}, or a longer trace",
        )
    times = [row.arrival - rows[0].arrival for row in rows]
    if times != sorted(times):
        raise UsageError("the trace is not in order of time", where=str(path), hint="sort its lines by time of arrival")
    return [dataclasses.replace(row, arrival=time) for row, time in zip(rows, times, strict=True)]


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


def _read_csv(path: Path, count: int) -> list[TraceRow]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not set(_COLUMNS) <= set(reader.fieldnames or ()):
            raise UsageError(
                "the trace lacks columns",
                where=str(path),
                expected=",".join(_COLUMNS),
                got=",".join(reader.fieldnames or ()),
            )
        found = [_read_row(row, f"{path}:{line}") for line, row in zip(range(2, count + 2), reader, strict=False)]
    return [
        TraceRow(arrival=(when - found[0][0]).total_seconds(), input_len=context, output_len=generated)
        for when, context, generated in found
    ]


def _read_lines(path: Path, count: int) -> list[TraceRow]:
    rows = []
    with path.open() as file:
        for line, text in zip(range(1, count + 1), file, strict=False):
            try:
                values = json.loads(text)
                arrival, lengths = float(values["arrival"]), (values["input_len"], values["output_len"])
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    "a line of the trace cannot be read",
                    where=f"{path}:{line}",
                    got=repr(error),
                    expected='{"arrival": seconds, "input_len": tokens, "output_len": tokens}',
                ) from error
            if not all(isinstance(length, int) and length >= 1 for length in lengths):
                raise UsageError(
                    "a line of the trace has a length of 0 tokens", where=f"{path}:{line}", got=str(lengths)
                )
            rows.append(TraceRow(arrival=arrival, input_len=lengths[0], output_len=lengths[1]))
    return rows


def _read_row(row: dict[str, str], where: str) -> tuple[datetime.datetime, int, int]:
    try:
        when = datetime.datetime.fromisoformat(row["TIMESTAMP"][:_MICROSECONDS])
        context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (ValueError, TypeError) as error:
        raise UsageError(
            "a row of the trace cannot be read",
            where=where,
            expected="a time such as 2023-11-16 18:01:51.1, and two whole numbers",
            got=str(error),
        ) from error
    if context < 1 or generated < 1:
        raise UsageError(
            "a row of the trace has a length of 0 tokens",
            where=where,
            expected="ContextTokens and GeneratedTokens of 1 or more",
            got=f"{context}, {generated}",
        )
    return when, context, generated
