"""Whether tokens flow: a thread of its own looks at the executor, and anybody may ask without waiting for anything.

ready    no work, or a step that ended a moment ago
stalled  work, and no step has ended for `stall_timeout`; or the executor does not even answer
"""

import threading
import time
from collections.abc import Callable

from ingot.runtime.executor import Stats
from ingot.runtime.model_runner import ModelRunner

_PERIOD = 0.25  # seconds between two looks


class Pulse:
    """The executor's heartbeat. `stats`: as of the last look."""

    def __init__(self, runner: ModelRunner, stall_timeout: float, on_look: Callable[[], None]) -> None:
        """on_look: what else is to be done on this thread at every look."""
        self._executor, self._timeout, self._on_look = runner.executor, stall_timeout, on_look
        self.stats: Stats = runner.stats()
        self._looked = self._moved = time.monotonic()
        self._seconds = 0.0  # that steps took so far: it grows with every step
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ingot pulse", daemon=True)
        self._thread.start()

    def stalled(self) -> str | None:
        """Why no tokens flow, or None."""
        now = time.monotonic()
        if now - self._looked > self._timeout:
            return f"the executor has not answered for {now - self._looked:.1f} s"
        if now - self._moved > self._timeout:
            waiting = self.stats["requests_running"] + self.stats["requests_waiting"]
            return f"no step has ended for {now - self._moved:.1f} s while {waiting} sequences run or wait"
        return None

    def close(self) -> None:
        """End the thread, if it can end."""
        self._end.set()
        self._thread.join(timeout=1)

    def _watch(self) -> None:
        was_idle = True
        while not self._end.wait(_PERIOD):
            self.stats = self._executor.stats()
            seconds = self._executor.work().session_seconds
            now = time.monotonic()
            idle = not (self.stats["requests_running"] or self.stats["requests_waiting"])
            if idle or was_idle or seconds != self._seconds:
                self._moved = now
            self._seconds, self._looked, was_idle = seconds, now, idle
            self._on_look()
