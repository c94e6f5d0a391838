"""A record → an SVG of bars: a panel for each regime, a bar for each engine.

No library draws it, so that the bytes are the same on every machine. Light pages and dark ones have a file each.
"""

from collections.abc import Mapping, Sequence
from html import escape

from tests.peers.record import Group, Record, Row
from tests.peers.regimes import title
from tests.peers.report import OURS

INK = {"light": ("#1f2328", "#59636e", "#c8ced6"), "dark": ("#f0f6fc", "#9198a1", "#4a525c")}
OURS_COLOUR = {"light": "#d4631b", "dark": "#f0883e"}
FONT = "font-family='-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"
WIDTH, LEFT, TOP, BAR, GAP = 880, 118, 64, 20, 8
PANEL = (WIDTH - LEFT) // 4
WORDS = {"decode:1": "1 request", "decode:8": "8 requests", "decode:32": "32 requests", "prefill:512": "prompt of 512"}


def chart(record: Record, precision: str, theme: str) -> str:
    """theme: "light" or "dark"."""
    group = next(group for group in record.groups if group.precision == precision)
    ink, faint, _ = INK[theme]
    height = TOP + len(group.rows) * (BAR + GAP) + 14
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
        f"role='img' aria-label='{escape(words(record, group), quote=True)}' {FONT}>",
        _text(0, 18, "Tokens per second; longer bars are better", ink, size=15, weight=600),
    ]
    for number, row in enumerate(group.rows):
        middle = _top(number) + BAR // 2
        colour, weight = (ink, 600) if row.engine == OURS else (faint, 400)
        lines += [
            _text(0, middle - 1, row.engine, colour, size=12, weight=weight),
            _text(0, middle + 11, row.weights, faint, size=10),
        ]
    for index, regime in enumerate(record.regimes):
        lines += _panel(group.rows, regime, LEFT + index * PANEL, theme)
    return "\n".join([*lines, "</svg>"]) + "\n"


def words(record: Record, group: Group) -> str:
    """The chart for those who do not see it."""
    rows = (f"{row.engine} {row.weights}: {_listed(row.speeds)}" for row in group.rows)
    return f"Tokens per second, {record.title}, {record.machine}, {record.date}. " + ". ".join(rows)


def _panel(rows: Sequence[Row], regime: str, left: int, theme: str) -> list[str]:
    ink, faint, grey = INK[theme]
    longest = max(row.speeds[regime] for row in rows)
    lines = [_text(left, TOP - 12, WORDS.get(regime, title(regime)), faint, size=12)]
    for number, row in enumerate(rows):
        speed, ours = row.speeds[regime], row.engine == OURS
        width = max(2, round((PANEL - 62) * speed / longest))
        fill = OURS_COLOUR[theme] if ours else grey
        lines += [
            f"<rect x='{left}' y='{_top(number)}' width='{width}' height='{BAR}' rx='3' fill='{fill}'/>",
            _text(left + width + 6, _top(number) + BAR // 2 + 4, f"{speed:,.0f}", ink, weight=600 if ours else 400),
        ]
    return lines


def _top(number: int) -> int:
    """Of a bar."""
    return TOP + number * (BAR + GAP)


def _text(x: int, y: int, text: str, fill: str, *, size: int = 12, weight: int = 400) -> str:
    return f"<text x='{x}' y='{y}' font-size='{size}' font-weight='{weight}' fill='{fill}'>{escape(text)}</text>"


def _listed(speeds: Mapping[str, float]) -> str:
    return ", ".join(f"{title(name)} {speed:g}" for name, speed in speeds.items())
