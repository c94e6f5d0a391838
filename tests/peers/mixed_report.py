"""The mixed load of all engines → a Markdown table in requests per second."""

from collections.abc import Callable, Sequence

from tests.peers.peers import INGOT
from tests.peers.rounds import Mixed, Outcome
from tests.peers.table import table

Figure = Callable[[Mixed], float | None]
"""Requests per second; None where it is not known."""


def at_once(mixed: Mixed) -> float | None:
    """When all requests come together."""
    return mixed.at_once


def goodput(limit: int) -> Figure:
    """Under a limit of TPOT, by its number. Of a search that was cut short it is the highest rate so far."""
    return lambda mixed: mixed.goodputs[limit] if mixed.goodputs else None


def mixed_table(load: str, tpots: Sequence[float], outcomes: Sequence[Outcome]) -> list[str]:
    """load: what it is, in words; tpots: seconds."""
    figures: list[Figure] = [at_once, *(goodput(number) for number in range(len(tpots)))]
    limits = [f"goodput, TPOT < {1e3 * tpot:g} ms" for tpot in tpots]
    columns = ["engine", "weights", "alone: TTFT, TPOT", "all at once", *limits]
    rows = []
    for precision in dict.fromkeys(outcome.precision for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.precision == precision]
        for outcome in group:
            cells = [_cell(outcome, figure) for figure in figures]
            rows.append([outcome.engine, outcome.weights, _alone(outcome), *cells])
        rows.append(["*ingot over the best peer*", precision, "", *(_ratio(group, figure) for figure in figures)])
    words = (
        f"Mixed load: {load}. Requests per second; alone: medians of some whose prompts are longer than nine in ten."
    )
    return [words, "", *table(columns, rows)]


def _cell(outcome: Outcome, figure: Figure) -> str:
    value = None if outcome.mixed is None else figure(outcome.mixed)
    return "–" if value is None else f"{value:.3g}"


def _alone(outcome: Outcome) -> str:
    trials = [] if outcome.mixed is None else outcome.mixed.trials
    if not trials or not trials[0].ttft:
        return "–"
    tpot = f", {1e3 * trials[0].tpot[0]:.0f} ms" if trials[0].tpot else ""
    return f"{trials[0].ttft[0]:.2f} s{tpot}"


def _ratio(group: Sequence[Outcome], figure: Figure) -> str:
    """ingot's figure over the highest of another engine."""
    known = [(outcome, value) for outcome in group if outcome.mixed and (value := figure(outcome.mixed)) is not None]
    ours = [value for outcome, value in known if outcome.engine == INGOT.name]
    others = [
        (value, f"{outcome.engine} {outcome.weights}") for outcome, value in known if outcome.engine != INGOT.name
    ]
    if not ours or not others or not ours[0]:
        return "–"
    best, name = max(others)
    return f"{ours[0] / best:.2f} ({name})" if best else "no peer has any"
