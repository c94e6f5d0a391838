"""What steps bring to requests, on its way from the engine thread to the thread that asked for it.

engine thread   put ─▶ [after step 1] [after step 2] ...      get ─▶ reader, which reads the requests up to there
"""

import contextlib
import queue
from typing import NamedTuple

from ingot.runtime.request import Request


class Progress(NamedTuple):
    """How far a request had come after a step.

    num_generated  how many tokens it had. These and what belongs to them never change: any thread may read them
    ended          whether it has ended with them; then all of the request may be read
    """

    request: Request
    num_generated: int
    ended: bool


StreamDelta = list[Progress]
"""What one step brought, or several that ran in one crossing: every request in it at most once."""


class Outlet:
    """The queue of one reader, for one request or many.

    every_step  False: the reader is told of ends alone
    """

    def __init__(self, *, every_step: bool = True) -> None:
        self.every_step = every_step
        self._queue: queue.SimpleQueue[StreamDelta] = queue.SimpleQueue()

    def put(self, news: StreamDelta) -> None:
        """On the engine thread."""
        self._queue.put(news)

    def get(self, timeout: float | None = None) -> StreamDelta:
        """What came first, as soon as there is anything; nothing after `timeout` seconds."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return []

    def get_all(self) -> StreamDelta:
        """Everything there is, as soon as there is anything: of each request how far it has come last."""
        latest = {progress.request: progress for progress in self._queue.get()}
        with contextlib.suppress(queue.Empty):
            while True:
                latest.update((progress.request, progress) for progress in self._queue.get_nowait())
        return list(latest.values())

    def wake(self) -> None:
        """Let the reader look up: `get` and `get_all` return nothing new."""
        self._queue.put([])
