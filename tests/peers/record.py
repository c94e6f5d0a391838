"""What stays of a comparison: a record in results/, from which `tests.peers.page` writes the tables and the chart.

The program writes one beside its results.json. Copy it to `results/<date>-<machine>-<model>.json` to publish it.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.configs.exact import read_exactly
from ingot.errors import ConfigError
from tests.peers.report import OURS, Heading, against_best, median_fraction, median_limit, median_speed
from tests.peers.rounds import Mixed, Outcome

FOLDER = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One engine. speeds: tokens per second by regime; fractions: of the limit. Medians of the rounds."""

    engine: str
    weights: str
    speeds: Mapping[str, float]
    fractions: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Engines of one class of weights. ratios: ingot over the fastest peer by regime, one for each round."""

    precision: str
    rows: tuple[Row, ...]
    limits: Mapping[str, float]
    ratios: Mapping[str, tuple[float, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadRow:
    """One engine under a mixed load. ttft, tpot: seconds of a request alone. at_once, goodputs: requests per second;
    one goodput for each limit of TPOT, None where the search was given up."""

    engine: str
    weights: str
    ttft: float | None
    tpot: float | None
    at_once: float
    goodputs: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A mixed load. concurrent: requests that run at once at most; ttft, tpots: limits of a good request, seconds."""

    words: str
    concurrent: int
    ttft: float
    tpots: tuple[float, ...]
    rows: tuple[LoadRow, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One comparison on one machine."""

    title: str
    date: str
    machine: str
    isa: str
    threads: int
    model: str
    rounds: int
    command: str
    regimes: tuple[str, ...]
    versions: Mapping[str, str]
    notes: tuple[str, ...]
    groups: tuple[Group, ...]
    load: Load | None


def read(path: Path) -> Record:
    """A record from its file. Raises ConfigError."""
    words = "a record of a comparison cannot be read"
    hint = "copy the record.json that python -m tests.peers wrote"
    return read_exactly(Record, json.loads(path.read_text()), what=words, where=str(path), error=ConfigError, hint=hint)


def written(record: Record) -> str:
    """The text of its file."""
    return json.dumps(dataclasses.asdict(record), indent=1) + "\n"


def record_of(
    heading: Heading, outcomes: Sequence[Outcome], command: str, concurrent: int, ttft: float | None
) -> Record:
    """What was measured. concurrent, ttft: of the mixed load."""
    ran = [outcome for outcome in outcomes if outcome.turns]
    loaded = [outcome for outcome in outcomes if outcome.mixed is not None and outcome.mixed.at_once is not None]
    load = None
    if heading.load is not None and ttft is not None:
        rows = tuple(_load_row(outcome, outcome.mixed) for outcome in loaded if outcome.mixed is not None)
        load = Load(words=heading.load, concurrent=concurrent, ttft=ttft, tpots=tuple(heading.tpots), rows=rows)
    return Record(
        title=f"{heading.model}, {heading.isa}",
        date=heading.date.split()[0],
        machine=heading.machine,
        isa=heading.isa,
        threads=heading.threads,
        model=heading.model,
        rounds=heading.rounds,
        command=command,
        regimes=tuple(heading.regimes),
        versions={outcome.engine: outcome.version for outcome in ran if outcome.engine != OURS and outcome.version},
        notes=tuple(f"{each.engine} {each.weights} did not run: {each.reason}" for each in outcomes if each.reason),
        groups=tuple(
            _group(heading, [each for each in ran if each.precision == precision], precision)
            for precision in dict.fromkeys(outcome.precision for outcome in ran)
            if heading.regimes
        ),
        load=load,
    )


def _group(heading: Heading, outcomes: Sequence[Outcome], precision: str) -> Group:
    rows = tuple(
        Row(
            engine=outcome.engine,
            weights=outcome.weights,
            speeds={name: round(median_speed(outcome, name), 1) for name in heading.regimes},
            fractions={name: round(median_fraction(outcome, name), 2) for name in heading.regimes},
        )
        for outcome in outcomes
    )
    ratios = {name: against_best(outcomes, precision, name) for name in heading.regimes}
    return Group(
        precision=precision,
        rows=rows,
        limits={name: float(round(median_limit(outcomes, precision, name))) for name in heading.regimes},
        ratios={name: tuple(round(each, 2) for each in found.rounds) for name, found in ratios.items() if found},
    )


def _load_row(outcome: Outcome, mixed: Mixed) -> LoadRow:
    alone = mixed.trials[0] if mixed.trials and mixed.trials[0].ttft else None
    assert mixed.at_once is not None, "asked for those alone that got through"
    return LoadRow(
        engine=outcome.engine,
        weights=outcome.weights,
        ttft=None if alone is None else round(alone.ttft[0], 2),
        tpot=None if alone is None or not alone.tpot else round(alone.tpot[0], 3),
        at_once=float(f"{mixed.at_once:.3g}"),
        goodputs=tuple(float(f"{each:.3g}") for each in mixed.goodputs),
    )
