"""A report of `ingot bench serve --url` → a PNG: how TTFT, TPOT and ITL are spread, one curve per run."""

from pathlib import Path
from typing import Any

import numpy as np

from ingot.bench.load_test import OnlineReport
from ingot.errors import UsageError, install

_PANELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}


def check_plotting() -> None:
    """Raise UsageError, before anything is measured, if nothing could be drawn."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--plot needs matplotlib", hint=install("bench")) from error
    matplotlib.use("agg")


def new_figure(panels: int) -> Any:
    """An empty figure of matplotlib, for panels side by side."""
    from matplotlib.figure import Figure

    return Figure(figsize=(4 * panels, 4), layout="constrained")


def plot(report: OnlineReport, path: Path) -> None:
    """Write the picture."""
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
    figure.axes[0].legend(fontsize="small")
    figure.suptitle(f"{report.model} at {report.url}")
    figure.savefig(path, dpi=120)
