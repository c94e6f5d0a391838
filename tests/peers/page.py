"""Records in results/ → docs/results.md and the chart of the README: `python -m tests.peers.page` writes them."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.house.project import ROOT
from tests.peers.chart import chart
from tests.peers.record import FOLDER, Group, Load, LoadRow, Record, read
from tests.peers.regimes import title
from tests.peers.report import OURS
from tests.peers.table import table

HEADLINE = "2026-11-23-emerald-rapids-tinyllama"  # the record of the README's chart
PRECISION = "w4g128"  # and its class
UPDATE = "run: python -m tests.peers.page"
_HEAD = """# Results beside other engines

This page compares ingot's speed with other engines. [Speed](speed.md) explains the method, the limit of a machine, and
what these results cannot say. `python -m tests.peers.page` writes the page from the records in `tests/peers/results`.

Each model has the shape that its title names, and random weights. The tables show tokens per second, as the median of
the rounds. A percentage is the share of the machine's limit. The last row of each class of weights shows ingot's speed
divided by that of the fastest other engine, for each round.

Records up to 2026-11-23 were copied from the tables of that day. The command of such a record says what the table
measured. Newer records are written by the program itself.
"""


def pages() -> dict[Path, str]:
    """Every file that is written, with its text."""
    headline = read(FOLDER / f"{HEADLINE}.json")
    images = {theme: ROOT / f"docs/images/speed-{theme}.svg" for theme in ("light", "dark")}
    written = {path: chart(headline, PRECISION, theme) for theme, path in images.items()}
    records = sorted(FOLDER.glob("*.json"), key=lambda path: (path.stem != HEADLINE, _backwards(path.stem)))
    text = "\n".join([_HEAD, *("\n".join(_section(read(path))) for path in records)])
    return {ROOT / "docs/results.md": text, **written}


def readme_sentence() -> str:
    """What the README says of speed: medians of its chart, and single rounds of every record, without screened ones."""
    chosen = next(group for group in read(FOLDER / f"{HEADLINE}.json").groups if group.precision == PRECISION)
    here = [statistics.median(found) for found in chosen.ratios.values()]
    groups = (group for path in FOLDER.glob("*.json") for group in read(path).groups)
    rounds = [
        each for group in groups if "-" not in group.precision for found in group.ratios.values() for each in found
    ]
    return (
        f"In this comparison ingot is {min(here):.2f} to {max(here):.2f} times as fast as the fastest of llama.cpp and "
        f"OpenVINO GenAI. In single rounds on all machines and in all formats, the ratio is {min(rounds):.2f} to "
        f"{max(rounds):.2f}."
    )


def _backwards(stem: str) -> tuple[int, str]:
    """Newest first, then by name."""
    return -int(stem[:10].replace("-", "")), stem


def _section(record: Record) -> Iterator[str]:
    yield f"## {record.title}, {record.date}"
    yield ""
    yield f"{record.machine}, {record.isa}, {record.threads} threads. {_rounds(record)}"
    yield ""
    yield f"```\n{record.command}\n```\n"
    if record.groups:
        yield from _speeds(record)
        yield ""
    if record.load is not None:
        yield from _load(record.load)
        yield ""
    yield from (f"- {note}" for note in record.notes)
    yield from (f"- {engine}: {version}" for engine, version in record.versions.items())
    yield ""


def _rounds(record: Record) -> str:
    return "One round." if record.rounds == 1 else f"Medians of {record.rounds} rounds."


def _speeds(record: Record) -> list[str]:
    rows = [row for group in record.groups for row in _group(group, record.regimes)]
    return table(["engine", "weights", *map(title, record.regimes)], rows)


def _group(group: Group, regimes: Sequence[str]) -> Iterator[list[str]]:
    for row in group.rows:
        cells = [f"{row.speeds[name]:,.1f} ({row.fractions[name]:.0%})" for name in regimes]
        yield [row.engine, row.weights, *cells]
    if group.limits:
        yield ["*limit*", group.precision, *(f"*{group.limits[name]:,.0f}*" for name in regimes)]
    ratios = [" and ".join(f"{each:.2f}" for each in group.ratios[name]) for name in regimes]
    yield ["**ingot / fastest other engine**", group.precision, *(f"**{each}**" for each in ratios)]


def _load(load: Load) -> list[str]:
    limits = [f"goodput, TPOT < {1e3 * tpot:g} ms" for tpot in load.tpots]
    rows = [
        [
            row.engine,
            row.weights,
            "" if row.ttft is None or row.tpot is None else f"{row.ttft:.2f} s, {1e3 * row.tpot:.0f} ms",
            f"{row.at_once:.3g}",
            *("search given up" if each is None else f"{each:.3g}" for each in row.goodputs),
        ]
        for row in load.rows
    ]
    rows.append(["**ingot / best other engine**", "", "", *_ratios(load.rows)])
    words = (
        f"Mixed load: {load.words}. At most {load.concurrent} requests run at once. "
        f"A good request has its first token within {load.ttft:g} s."
    )
    columns = ["engine", "weights", "alone: TTFT, TPOT", "all at once, requests/s", *limits]
    return [words, "", *table(columns, rows)]


def _ratios(rows: Sequence[LoadRow]) -> Iterator[str]:
    """In each column of requests per second."""
    figures = [(row.engine, (row.at_once, *row.goodputs)) for row in rows]
    for column in range(len(figures[0][1])):
        ours = next(found[column] for engine, found in figures if engine == OURS)
        theirs = [found[column] for engine, found in figures if engine != OURS]
        if ours is None or None in theirs:
            yield ""
        else:
            best = max(each for each in theirs if each is not None)
            yield f"**{ours / best:.2f}**" if best else "**others: 0**"


def main() -> None:
    """Write them."""
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
