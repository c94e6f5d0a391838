"""Whether tokens flow: a thread of its own looks at the executor, and anybody may ask without waiting for anything.

ready    no work, or a step that ended a moment ago
stalled  for `stall_timeout` there is work, and no step has ended; or the executor does not even answer; or one piece
         of text takes that long; or all threads that prepare requests are at it, and none has come to its end
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ingot.runtime.executor import Stats
from ingot.runtime.text_loop import TextLoop

Result = TypeVar("Result")

_PERIOD = 0.25  # seconds between two looks
_THREADS = 4


class Pool:
    """Threads for templates and tokenizers. For the event loop.

    full  since when every thread has been busy and none has come to an end; None: some thread is free
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ingot text")
        self._busy = 0
        self.full: float | None = None

    def run(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """What `work` returns or raises."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._note(+1)
        future.add_done_callback(self._ended)
        return future

    def close(self) -> None:
        """Wait for what runs."""
        self._threads.shutdown()

    def _ended(self, future: "asyncio.Future[Result]") -> None:
        self._note(-1)
        if not future.cancelled():
            future.exception()  # somebody may have given up waiting for it

    def _note(self, change: int) -> None:
        was_full, self._busy = self._busy >= _THREADS, self._busy + change
        if self._busy < _THREADS:
            self.full = None
        elif change < 0 or not was_full:
            self.full = time.monotonic()


class Pulse:
    """The heartbeat of the executor, of the text thread and of the pool. `stats`: as of the last look."""

    def __init__(self, texts: TextLoop, pool: "Pool", stall_timeout: float, on_look: Callable[[], None]) -> None:
        """on_look: what else is to be done on this thread at every look."""
        self._texts, self._pool, self._timeout, self._on_look = texts, pool, stall_timeout, on_look
        self._executor = texts.runner.executor
        self.stats: Stats = self._executor.stats()
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
        turning = self._texts.turning
        if turning is not None and now - turning > self._timeout:
            return f"the text of a token has not been ready for {now - turning:.1f} s"
        full = self._pool.full
        if full is not None and now - full > self._timeout:
            return f"no request has been prepared for {now - full:.1f} s: chat template or tokenizer are stuck"
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
