"""What ingot says while it works, all on stderr: a bar on a terminal, plain lines in a log."""

import enum
import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


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
        self._last = 0.0

    def __enter__(self) -> "Talk":
        if self._stream.isatty() and self._level >= Level.INFO:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
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
        """`done` of `total` (bytes, passes, rounds: of anything) are finished; `stage` is what happens now."""
        if self._level < Level.INFO:
            return
        if self._bar is not None:
            if stage != self._stage or self._task is None:
                self._task = self._bar.add_task(stage, total=total)
            self._bar.update(self._task, completed=done, total=total)
        else:
            now = time.monotonic()
            if stage != self._stage or done >= total or now - self._last > self.PERIOD:
                self._say(f"{stage} {done / total:.0%}" if total else stage)
                self._last = now
        self._stage = stage

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
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)
