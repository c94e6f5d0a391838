"""Whether tokens flow: a thread of its own looks at the executor, and anybody may ask without waiting for anything.

ready       no work, or a step that ended a moment ago
stuck       for `stall_timeout` there is work, and no step has ended; or the executor does not even answer; or one piece
            of text takes that long; or every thread that prepares requests has been at the same one
overloaded  for that long a request has waited for one of these threads, and they do get done
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ingot.runtime.executor import Stats
from ingot.runtime.text_loop import TextLoop

Result = TypeVar("Result")

_PERIOD = 0.25  # seconds between two looks
_THREADS = 4


class Pool:
    """Threads for templates and tokenizers. For the event loop; `trouble` from anywhere."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ingot text")
        self._lock = threading.Lock()
        self._waiting: deque[float] = deque()  # when each came that no thread has begun, oldest first
        self._begun: dict[int, float] = {}  # thread → when it began what it is at

    def run(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """What `work` returns or raises."""
        with self._lock:
            self._waiting.append(time.monotonic())
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._work, work)
        future.add_done_callback(_look_at)
        return future

    def trouble(self, seconds: float) -> str | None:
        """What has lasted longer than `seconds`: every thread is stuck, or a request waits though threads get done."""
        now = time.monotonic()
        with self._lock:
            begun, waiting = tuple(self._begun.values()), tuple(self._waiting)
        if len(begun) == _THREADS and now - max(begun) > seconds:
            return f"no request has been prepared for {now - max(begun):.1f} s: chat template or tokenizer are stuck"
        if waiting and now - waiting[0] > seconds:
            return (
                f"overloaded: a request has waited {now - waiting[0]:.1f} s for its turn with chat template or "
                f"tokenizer, and {len(waiting)} wait"
            )
        return None

    def close(self) -> None:
        """Wait for what runs."""
        self._threads.shutdown()

    def _work(self, work: Callable[[], Result]) -> Result:
        """On one of the threads; they take what came first."""
        with self._lock:
            self._waiting.popleft()
            self._begun[threading.get_ident()] = time.monotonic()
        try:
            return work()
        finally:
            with self._lock:
                del self._begun[threading.get_ident()]


def _look_at(future: "asyncio.Future[Result]") -> None:
    """asyncio complains about errors that nobody sees, and whoever asked may have given up waiting."""
    if not future.cancelled():
        future.exception()


class Pulse:
    """The heartbeat of the executor, of the text thread and of the pool. `stats`: as of the last look."""

    def __init__(self, texts: TextLoop, pool: "Pool", stall_timeout: float, on_look: Callable[[], None]) -> None:
        """on_look: what else is to be done at every look; off the event loop, maybe on two threads at once."""
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
        return self._pool.trouble(self._timeout)

    def read(self) -> None:
        """Take the executor's counts as they are now. Waits for its lock, not for a step; from any thread."""
        self.stats = self._executor.stats()
        self._on_look()

    def close(self) -> None:
        """End the thread, if it can end."""
        self._end.set()
        self._thread.join(timeout=1)

    def _watch(self) -> None:
        was_idle = True
        while not self._end.wait(_PERIOD):
            self.read()
            seconds = self._executor.work().session_seconds
            now = time.monotonic()
            idle = not (self.stats["requests_running"] or self.stats["requests_waiting"])
            if idle or was_idle or seconds != self._seconds:
                self._moved = now
            self._seconds, self._looked, was_idle = seconds, now, idle
