"""Whether tokens flow: the threads say when they began what they are at, and nobody who asks waits for them.

ready       no work, or a step that ended a moment ago
stuck       for `stall_timeout` there is work, and no step has ended; or one piece of text takes that long; or every
            thread that prepares requests has been at the same one
overloaded  for that long a request has waited for one of these threads, and they do get done
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ingot.runtime.detokenizer_thread import DetokenizerThread

Result = TypeVar("Result")

_THREADS = 4


class PrepareExecutor:
    """Threads for templates and tokenizers. For the event loop; `trouble` from anywhere."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._count = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ingot prepare")
        self._lock = threading.Lock()
        self._waiting: deque[float] = deque()  # when each came that no thread has begun, oldest first
        self._begun: dict[int, float] = {}  # thread → when it began what it is at

    def run(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """What `work` returns or raises."""
        with self._lock:
            self._waiting.append(time.monotonic())
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._work, work)
        future.add_done_callback(look_at)
        return future

    def trouble(self, seconds: float) -> str | None:
        """What has lasted longer than `seconds`: every thread is stuck, or a request waits though threads get done."""
        now = time.monotonic()
        with self._lock:
            begun, waiting = tuple(self._begun.values()), tuple(self._waiting)
        if len(begun) == self._count and now - max(begun) > seconds:
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


def look_at(future: "asyncio.Future[Result]") -> None:
    """asyncio complains about errors that nobody sees, and the caller may have given up waiting."""
    if not future.cancelled():
        future.exception()


class HealthMonitor:
    """The heartbeat of the engine thread, of the text thread and of the pool."""

    def __init__(self, texts: DetokenizerThread, pool: PrepareExecutor, stall_timeout: float) -> None:
        self._texts, self._pool, self._timeout = texts, pool, stall_timeout

    def stalled(self) -> str | None:
        """Why no tokens flow, or None."""
        now, beat, busy_since = time.monotonic(), self._texts.runner.executor.beat, self._texts.busy_since
        if beat.busy and now - beat.at > self._timeout:
            waiting = beat.stats["requests_running"] + beat.stats["requests_waiting"]
            return f"no step has ended for {now - beat.at:.1f} s while {waiting} sequences run or wait"
        if busy_since is not None and now - busy_since > self._timeout:
            return f"the text of a token has not been ready for {now - busy_since:.1f} s"
        return self._pool.trouble(self._timeout)
