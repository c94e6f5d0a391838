"""Records in results/ → docs/results.md and the chart of the README: `python -m tests.peers.page` writes them."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.house.project import ROOT
from tests.peers.chart import chart
from tests.peers.peers import SCREENED
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

Each model has random weights, and the shape of the model that the title names. How to read a table:

| part of a table | meaning |
|---|---|
| a column such as `decode 8` or `prefill 512` | tokens per second when 8 sequences decode, \
or when a prompt of 512 tokens is computed: the median of the rounds |
| a percentage | the share of the machine's limit that the engine reaches |
| a row "*limit*" | the tokens per second that memory bandwidth and peak arithmetic of the machine allow |
| a row "ingot / fastest other engine" | ingot's speed divided by that of the fastest other engine \
with weights of this class, one number for each round |
| alone | TTFT and TPOT of a request that runs alone |
| goodput | the highest rate of requests, per second, at which at least \
90 % of the requests meet the limits of TTFT and TPOT |

Records up to 2026-11-23 were typed in from printed tables; their commands say what the tables measured.
`python -m tests.peers` wrote the later records.
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
        each for group in groups if group.precision != SCREENED for found in group.ratios.values() for each in found
    ]
    return (
        f"In this comparison ingot is {min(here):.2f} to {max(here):.2f} times as fast as the fastest of llama.cpp and "
        f"OpenVINO GenAI. In single rounds of all published records, the ratio is {min(rounds):.2f} to "
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
    yield from (f"- Version of {engine}: {version}" for engine, version in record.versions.items())
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
            *("not found" if each is None else f"{each:.3g}" for each in row.goodputs),
        ]
        for row in load.rows
    ]
    rows.append(["**ingot / best other engine**", "", "", *_ratios(load.rows)])
    words = (
        f"Mixed load: {load.words}. At most {load.concurrent} requests run at once. "
        f"A good request has its first token within {load.ttft:g} s."
    )
    columns = ["engine", "weights", "alone: TTFT, TPOT", "requests/s, all at once", *limits]
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
            yield f"**{ours / best:.2f}**" if best else "other engines: 0"


def main() -> None:
    """Write them."""
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
