"""What ingot says while it works, all on stderr: a bar on a terminal, plain lines in a log."""

import contextlib
import enum
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from ingot.configs.sizes import format_bytes

WIDEST = 100  # columns of wrapped text
_WORD = 20  # characters of a row's name, at most


class Level(enum.IntEnum):
    """How much is said; names are TensorRT-LLM's."""

    ERROR = 0
    WARNING = 1
    INFO = 2
    VERBOSE = 3


LEVELS = {
    "internal_error": Level.ERROR,
    "error": Level.ERROR,
    "warning": Level.WARNING,
    "info": Level.INFO,
    "verbose": Level.VERBOSE,
    "debug": Level.VERBOSE,
    "trace": Level.VERBOSE,
}


class CliConsole:
    """Progress of long work and remarks beside it. A context manager: leaving it clears the bar.

    A terminal gets a bar once the work has taken DELAY. In a log a stage prints a line every PERIOD, and one at its end
    if it has printed any: short work prints none.
    """

    DELAY = 0.5  # seconds
    PERIOD = 10.0  # seconds

    def __init__(self, level: Level = Level.INFO, stream: TextIO | None = None) -> None:
        self._level = level
        self._stream = stream or sys.stderr
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage, self._told = "", False  # what happens now; whether the log has a line of it
        self._begin, self._before = 0.0, 0  # of the stage: when it began, what was done before it
        self._last: float | None = None  # when the log had its last line, or the work began

    def __enter__(self) -> "CliConsole":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.hide()

    def hide(self) -> None:
        """Take the bar away, before text goes to the same terminal; further progress shows it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def progress(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` (passes, rounds: of anything) are finished; `stage` is what happens now.

        A total of 0: nobody knows how much there is, and only the time is shown.
        """
        self._progress(stage, done, total, None)

    def progress_bytes(self, stage: str, done: int, total: int) -> None:
        """`progress` of bytes: their rate is shown too."""
        self._progress(stage, done, total, lambda rate: format_bytes(round(rate)))

    def progress_requests(self, stage: str, done: int, total: int) -> None:
        """`progress` of requests: their rate is shown too."""
        self._progress(stage, done, total, lambda rate: f"{rate:.2g} requests")

    def _progress(self, stage: str, done: int, total: int, spell: Callable[[float], str] | None) -> None:
        if self._level < Level.INFO:
            return
        now = time.monotonic()
        self._last = now if self._last is None else self._last
        is_new = stage != self._stage
        if is_new:
            self._stage, self._told = stage, False
            self._begin, self._before = now, done
        pace = _pace(now - self._begin, done - self._before, total - done, spell)
        if total == 0:
            pace = "" if is_new else f"{now - self._begin:.0f} s"
        if self._stream.isatty():
            if self._bar is not None or now - self._last > self.DELAY:
                self._show(stage, done, total, pace)
        elif now - self._last > self.PERIOD or (self._told and 0 < total <= done):
            share = f" {done / total:.0%}" if total else ""
            self._say(f"{stage}{share}{pace and f', {pace}'}")
            self._last, self._told = now, total == 0 or done < total

    def _show(self, stage: str, done: int, total: int, pace: str) -> None:
        """The bar of the stage that happens now."""
        if self._bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[pace]}"),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(stage, total=None, pace="")
            self._bar.start()
        assert self._task is not None, "a bar has its task"
        self._bar.update(self._task, description=stage, completed=done, total=total or None, pace=pace)

    def warn(self, text: str) -> None:
        if self._level >= Level.WARNING:
            self._say(f"warning: {text}")

    def note(self, text: str) -> None:
        if self._level >= Level.INFO:
            self._say(text)

    def detail(self, text: str) -> None:
        if self._level >= Level.VERBOSE:
            self._say(text)

    def _say(self, text: str) -> None:
        """Work goes on where its log cannot: the disk is full, or the terminal is gone."""
        with contextlib.suppress(OSError):
            text = wrapped(text, terminal_width(self._stream))
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)


def _pace(seconds: float, done: int, left: int, spell: Callable[[float], str] | None) -> str:
    """Rate and remaining time of what was done in `seconds`; empty before there is anything to say."""
    if seconds <= 0 or done <= 0:
        return ""
    rate = done / seconds
    said = [f"{spell(rate)}/s"] if spell is not None else []
    if left > 0:
        minutes, rest = divmod(round(left / rate), 60)
        said.append(f"{minutes}:{rest:02} left")
    return ", ".join(said)


def terminal_width(stream: TextIO | None = None) -> int:
    """Columns of the terminal that `stream` (stdout unless given) writes to; 0 if it is not a terminal."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else 0


def wrapped(text: str, width: int | None = None) -> str:
    """`text` with every line wrapped to the terminal, for people. A width of 0 leaves it as it is, for programs.

    The words of a row, which two spaces divide from its name, stay below each other. What follows a label (`next: `)
    is indented further. A row of the next command stays one line, so that it can be copied.
    """
    width = terminal_width() if width is None else width
    return "\n".join(_wrapped(line, min(width, WIDEST)) if width else line for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    text = line.lstrip()
    lead = len(line) - len(text)
    name, gap, words = text.partition("  ")
    if name == "next":
        return line
    below = lead + len(text) - len(words.lstrip()) if gap and len(name) <= _WORD else lead
    if lead and text.split(" ", 1)[0].endswith(":"):
        below = lead + 4
    return textwrap.fill(
        text,
        width,
        initial_indent=" " * lead,
        subsequent_indent=" " * below,
        break_on_hyphens=False,
        break_long_words=False,
    )
