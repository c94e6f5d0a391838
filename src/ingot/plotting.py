"""What plots of reports share: matplotlib, which only `--plot` needs, and a PNG file."""

from pathlib import Path
from typing import Any

from ingot.errors import UsageError, install


def check_plotting(path: Path) -> None:
    """Raise UsageError, before anything is measured, if nothing could be drawn or written."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--plot needs matplotlib", hint=install("bench")) from error
    matplotlib.use("agg")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            "the plot cannot be written",
            where=f"--plot {path}",
            expected="a file in a directory that exists",
            got="a directory" if path.is_dir() else f"no directory {path.parent}",
            hint="name a file, and make its directory first",
        )


def new_figure(panels: int) -> Any:
    """An empty figure of matplotlib, for panels side by side. Call `check_plotting` before."""
    from matplotlib.figure import Figure

    return Figure(figsize=(4 * panels, 4), layout="constrained")


def write_png(figure: Any, path: Path) -> None:
    """A PNG, whatever the file is called."""
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")
