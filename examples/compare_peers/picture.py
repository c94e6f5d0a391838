"""Outcomes → a PNG: tokens per second above, fractions of the limit below, a panel per regime."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from compare_peers.report import OURS, Heading, median_fraction, median_speed
from compare_peers.rounds import Outcome


def draw(heading: Heading, outcomes: Sequence[Outcome], path: Path) -> None:
    """Bars of those that ran, ingot's in colour."""
    ran = [outcome for outcome in outcomes if outcome.turns]
    labels = [f"{outcome.engine} {outcome.weights}" for outcome in ran]
    colours = ["tab:orange" if outcome.engine == OURS else "tab:gray" for outcome in ran]
    count = len(heading.regimes)
    figure = Figure(figsize=(4 * count, 3 + 0.5 * len(ran)), layout="constrained")
    panels = figure.subplots(2, count, squeeze=False, sharey=True)
    for column, regime in enumerate(heading.regimes):
        speeds = [median_speed(outcome, regime) for outcome in ran]
        fractions = [100 * median_fraction(outcome, regime) for outcome in ran]
        for panel, values, unit in zip(panels[:, column], (speeds, fractions), ("tokens/s", "% of limit"), strict=True):
            bars = panel.barh(labels, values, color=colours)
            panel.bar_label(bars, fmt="%.3g", padding=2, fontsize="small")
            panel.set_xlabel(unit)
            panel.margins(x=0.15)
        panels[0][column].set_title(regime.replace(":", " "))
    panels[0][0].invert_yaxis()
    figure.suptitle(f"{heading.model}, {heading.machine}, {heading.isa}, {heading.threads} threads, {heading.date}")
    figure.savefig(path, dpi=110)
