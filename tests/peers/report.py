"""Outcomes of all rounds → medians, fractions of the limits, ratios to the best peer, and a Markdown table."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from tests.peers.mixed_report import mixed_table
from tests.peers.regimes import title
from tests.peers.rounds import Outcome
from tests.peers.table import table

OURS = "ingot"
NO_TRACE = "no trace was given (--trace FILE)"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """ingot's speed over a peer's, in each round."""

    peer: str
    rounds: Sequence[float]

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.rounds)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """What the table is about. load: the mixed one in words, None: there was none; tpots: its limits, seconds."""

    model: str
    date: str
    machine: str
    isa: str
    threads: int
    rounds: int
    regimes: Sequence[str]
    load: str | None = None
    tpots: Sequence[float] = ()


def median_speed(outcome: Outcome, regime: str) -> float:
    """Tokens per second, median of the rounds."""
    return statistics.median(turn.speeds[regime] for turn in outcome.turns)


def median_fraction(outcome: Outcome, regime: str) -> float:
    """Of the limit that was measured beside each, median of the rounds."""
    return statistics.median(turn.speeds[regime] / turn.limits[regime] for turn in outcome.turns)


def median_limit(outcomes: Sequence[Outcome], precision: str, regime: str) -> float:
    """Of all rounds of all variants of a class."""
    return statistics.median(
        turn.limits[regime] for outcome in outcomes if outcome.precision == precision for turn in outcome.turns
    )


def ratio(ours: Outcome, other: Outcome, regime: str) -> Ratio:
    """Round by round; rounds that one of them lacks do not count."""
    found = [mine.speeds[regime] / theirs.speeds[regime] for mine, theirs in zip(ours.turns, other.turns, strict=False)]
    name = f"{other.engine} {other.weights}"
    return Ratio(peer=name, rounds=found)


def against_best(outcomes: Sequence[Outcome], precision: str, regime: str) -> Ratio | None:
    """ingot against the peer that is fastest in this class and regime; None where either did not run."""
    ran = [outcome for outcome in outcomes if outcome.precision == precision and outcome.turns]
    ours = [outcome for outcome in ran if outcome.engine == OURS]
    others = [outcome for outcome in ran if outcome.engine != OURS]
    if not ours or not others:
        return None
    return ratio(ours[0], max(others, key=lambda outcome: median_speed(outcome, regime)), regime)


def markdown(heading: Heading, outcomes: Sequence[Outcome]) -> str:
    """The whole report."""
    lines = [
        f"Shape of {heading.model}, random weights; {heading.machine}, {heading.isa}, {heading.threads} threads; "
        f"{heading.date}.",
        "",
    ]
    if heading.regimes:
        lines += [*_speeds(heading, outcomes), "", *_ratios(heading, outcomes), ""]
    if heading.load is not None:
        lines += [*mixed_table(heading.load, heading.tpots, outcomes), ""]
    return "\n".join([*lines, *_notes(heading, outcomes)]) + "\n"


def _speeds(heading: Heading, outcomes: Sequence[Outcome]) -> list[str]:
    """Tokens per second of every engine in every regime."""
    columns, rows = ["engine", "weights", *map(title, heading.regimes)], []
    for precision in dict.fromkeys(outcome.precision for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.precision == precision]
        rows += [[outcome.engine, outcome.weights, *_cells(outcome, heading.regimes)] for outcome in group]
        if any(outcome.turns for outcome in group):
            limits = [f"*{median_limit(group, precision, name):,.0f}*" for name in heading.regimes]
            rows.append(["*limit*", precision, *limits])
    words = f"Tokens per second, medians of {heading.rounds} rounds in turn, and fractions of the limit."
    return [words, "", *table(columns, rows)]


def _cells(outcome: Outcome, regimes: Sequence[str]) -> list[str]:
    if not outcome.turns:
        return ["–"] * len(regimes)
    return [f"{median_speed(outcome, name):.1f} ({median_fraction(outcome, name):.0%})" for name in regimes]


def _ratios(heading: Heading, outcomes: Sequence[Outcome]) -> list[str]:
    """ingot over the best peer of each class."""
    columns, rows = ["ingot over the best peer", *map(title, heading.regimes)], []
    for precision in dict.fromkeys(outcome.precision for outcome in outcomes):
        found = [against_best(outcomes, precision, name) for name in heading.regimes]
        rows.append([precision, *("–" if each is None else _ratio_cell(each) for each in found)])
    return table(columns, rows)


def _ratio_cell(found: Ratio) -> str:
    return f"{found.median:.2f} ({min(found.rounds):.2f} to {max(found.rounds):.2f}; {found.peer})"


def _notes(heading: Heading, outcomes: Sequence[Outcome]) -> list[str]:
    """Limits by class, versions, and what did not run and why."""
    lines = []
    for precision in dict.fromkeys(outcome.precision for outcome in outcomes):
        machines = [turn.machine for outcome in outcomes if outcome.precision == precision for turn in outcome.turns]
        if machines:
            gigabytes = statistics.median(machine.bandwidth for machine in machines) / 1e9
            peaks = {name: statistics.median(each.peaks[name] for each in machines) / 1e9 for name in machines[0].peaks}
            lines.append(
                f"- limits of {precision}: memory read {gigabytes:.1f} GB/s over {machines[0].buffer_bytes:,} bytes; "
                + ", ".join(f"{name} {peak:,.0f} Gop/s" for name, peak in peaks.items())
            )
    versions: Mapping[str, str] = {each.engine: each.version for each in outcomes if each.version}
    lines += [f"- {engine}: {version}" for engine, version in versions.items()]
    lines += [f"- not run: {each.engine} {each.weights}: {each.reason}" for each in outcomes if each.reason]
    if heading.load is None:
        return [*lines, f"- no mixed load: {NO_TRACE}"]
    failed = [(each, each.mixed.reason) for each in outcomes if each.mixed is not None and each.mixed.reason]
    return lines + [f"- no mixed load: {each.engine} {each.weights}: {reason}" for each, reason in failed]
