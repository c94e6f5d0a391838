"""A report of `ingot bench serve --url` → a PNG: how TTFT, TPOT and ITL are spread, one curve per run."""

from pathlib import Path

import numpy as np

from ingot.bench.load_test import OnlineReport
from ingot.plotting import new_figure, write_png

_PANELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}


def plot(report: OnlineReport, path: Path) -> None:
    """Write the picture. Call `check_plotting` before."""
    figure = new_figure(len(_PANELS))
    limits = {"ttft": report.ttft_ms, "tpot": report.tpot_ms}
    for place, (name, title) in enumerate(_PANELS.items(), start=1):
        panel = figure.add_subplot(1, len(_PANELS), place)
        for run in report.runs:
            values = np.sort(run.samples[name])
            if len(values):
                shares = np.arange(1, len(values) + 1) / len(values)
                panel.step(values, shares, where="post", label=f"{run.load}: {run.good_share:.0%} good")
        if name in limits:
            panel.axvline(limits[name], linestyle=":", color="gray")
        panel.set(xscale="log", xlabel=f"{title}, ms", ylabel="share of requests" if place == 1 else "", ylim=(0, 1))
        panel.grid(alpha=0.3)
    figure.suptitle(f"{report.model} at {report.url}")
    write_png(figure, path)
