"""Outcomes → a PNG: a column per regime, tokens/s above, fractions of the limit below; the mixed load beside."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.peers.mixed_report import at_once, goodput
from tests.peers.regimes import title
from tests.peers.report import OURS, Heading, median_fraction, median_speed
from tests.peers.rounds import Outcome


def draw(heading: Heading, outcomes: Sequence[Outcome], path: Path) -> None:
    """Bars of those that ran, ingot's in colour."""
    ran = [outcome for outcome in outcomes if outcome.turns or outcome.mixed is not None]
    count = len(heading.regimes) + (heading.load is not None)
    if not ran or not count:
        return
    figure = Figure(figsize=(4 * count, 3 + 0.5 * len(ran)), layout="constrained")
    panels = figure.subplots(2, count, squeeze=False, sharey=True)
    for column, regime in enumerate(heading.regimes):
        speeds = [median_speed(outcome, regime) if outcome.turns else 0.0 for outcome in ran]
        fractions = [100 * median_fraction(outcome, regime) if outcome.turns else 0.0 for outcome in ran]
        _bars(panels[0][column], ran, speeds, "tokens/s")
        _bars(panels[1][column], ran, fractions, "% of limit")
        panels[0][column].set_title(title(regime))
    if heading.load is not None:
        figures = [(at_once, "requests/s, all at once"), (goodput(0), _goodput_words(heading))]
        for panel, (figure_of, unit) in zip(panels[:, -1], figures, strict=True):
            values = [None if outcome.mixed is None else figure_of(outcome.mixed) for outcome in ran]
            _bars(panel, ran, [value or 0.0 for value in values], unit)
        panels[0][-1].set_title("mixed load")
    panels[0][0].invert_yaxis()
    figure.suptitle(f"{heading.model}, {heading.machine}, {heading.isa}, {heading.threads} threads, {heading.date}")
    figure.savefig(path, dpi=110)


def _goodput_words(heading: Heading) -> str:
    return f"requests/s, goodput with TPOT < {1e3 * heading.tpots[0]:g} ms"


def _bars(panel: Axes, ran: Sequence[Outcome], values: Sequence[float], unit: str) -> None:
    labels = [f"{outcome.engine} {outcome.weights}" for outcome in ran]
    bars = panel.barh(labels, values, color=["tab:orange" if each.engine == OURS else "tab:gray" for each in ran])
    panel.bar_label(bars, fmt="%.3g", padding=2, fontsize="small")
    panel.set_xlabel(unit)
    panel.margins(x=0.15)
