"""The simulated arrangements of a report → a PNG: TTFT, TPOT and cost over the rate, one curve per arrangement."""

from pathlib import Path

from ingot.planner.arrange import Arrangement
from ingot.planner.make_plan import PlanOptions, PlanReport
from ingot.plotting import new_figure, write_png

_PANELS = (("ttft", "TTFT, ms"), ("tpot", "TPOT, ms"), ("cost", "cost of a million tokens"))


def plot(report: PlanReport, options: PlanOptions, path: Path) -> None:
    """Medians are drawn through, 90th percentiles dashed, goals dotted. Call `check_plotting` before."""
    drawn = [each for each in report.arrangements if each.curve]
    panels = [each for each in _PANELS if each[0] != "cost" or any(one.cost is not None for one in drawn)]
    figure = new_figure(len(panels))
    for place, (name, title) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place)
        for number, arrangement in enumerate(drawn):
            for values, line in curves(arrangement, name):
                label = name_of(arrangement) if line == "-" else None
                axes.plot([point.rate for point in arrangement.curve], values, line, color=f"C{number}", label=label)
        if name != "cost" and (goal := getattr(options, name)) is not None:
            axes.axhline(1e3 * goal, linestyle=":", color="gray")
        axes.set(yscale="log", xlabel="requests per second", ylabel=title, xlim=(0, None))
        axes.grid(alpha=0.3)
    figure.suptitle(f"prompts of {options.input_len:,} tokens, answers of {options.output_len:,}; an estimate")
    write_png(figure, path)


def curves(arrangement: Arrangement, name: str) -> list[tuple[list[float], str]]:
    """(values at each rate, how the line is drawn). A value that is not known is NaN, which is not drawn."""
    given = (
        [[point.cost for point in arrangement.curve]]
        if name == "cost"
        else [
            [getattr(point.simulation, f"{name}_ms_{share}") for point in arrangement.curve] for share in ("p50", "p90")
        ]
    )
    lines = [[float("nan") if value is None else value for value in values] for values in given]
    return list(zip(lines, ("-", "--"), strict=False))


def name_of(arrangement: Arrangement) -> str:
    """As the table has it."""
    apart = f"{arrangement.prefill_replicas}+" if arrangement.prefill_replicas else ""
    return (
        f"{arrangement.device}, {arrangement.precision}, tp {arrangement.tp}, pp {arrangement.pp}, "
        f"replicas {apart}{arrangement.replicas}"
    )
