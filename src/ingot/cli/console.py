"""What ingot says while it works, all on stderr: a bar on a terminal, plain lines in a log."""

import contextlib
import enum
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from ingot.configs.sizes import format_bytes


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


class Talk:
    """Progress of long work and remarks beside it. A context manager: leaving it clears the bar.

    In a log a stage prints when it begins and when it ends, and at most every five seconds between.
    """

    PERIOD = 5.0  # seconds

    def __init__(self, level: Level = Level.INFO, stream: TextIO | None = None) -> None:
        self._level = level
        self._stream = stream or sys.stderr
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._begin, self._before = 0.0, 0  # of the stage: when it began, what was done before it
        self._last = 0.0

    def __enter__(self) -> "Talk":
        if self._stream.isatty() and self._level >= Level.INFO:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[pace]}"),
            )
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
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
        self._progress(stage, done, total, format_bytes)

    def _progress(self, stage: str, done: int, total: int, spell: Callable[[int], str] | None) -> None:
        if self._level < Level.INFO:
            return
        now = time.monotonic()
        is_new = stage != self._stage
        if is_new:
            self._stage, self._begin, self._before = stage, now, done
        pace = _pace(now - self._begin, done - self._before, total - done, spell)
        if total == 0:
            pace = "" if is_new else f"{now - self._begin:.0f} s"
        if self._bar is not None:
            if is_new or self._task is None:
                self._task = self._bar.add_task(stage, total=total or None, pace=pace)
            self._bar.update(self._task, completed=done, total=total or None, pace=pace)
        elif is_new or 0 < total <= done or now - self._last > self.PERIOD:
            share = f" {done / total:.0%}" if total else ""
            self._say(f"{stage}{share}{pace and f', {pace}'}")
            self._last = now

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
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self._stream, flush=True)


def _pace(seconds: float, done: int, left: int, spell: Callable[[int], str] | None) -> str:
    """Rate and remaining time of what was done in `seconds`; empty before there is anything to say."""
    if seconds <= 0 or done <= 0:
        return ""
    rate = done / seconds
    said = [f"{spell(round(rate))}/s"] if spell is not None else []
    if left > 0:
        minutes, rest = divmod(round(left / rate), 60)
        said.append(f"{minutes}:{rest:02} left")
    return ", ".join(said)
