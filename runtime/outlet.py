"""What steps bring to requests, on its way from the engine thread to the thread that asked for it.

engine thread   put ─▶ [after step 1] [after step 2] ...      get ─▶ reader, which reads the requests up to there
"""

import contextlib
import queue
from collections.abc import Iterable, Sequence
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


class Readers:
    """Who is told of which request, and what they will be told after the step. On the engine thread."""

    def __init__(self) -> None:
        self._outlets: dict[Request, Outlet] = {}
        self._only: Outlet | None = None  # of all requests, where they have the same
        self._silent = False  # whether there may be requests without an outlet
        self._news: dict[Outlet, StreamDelta] = {}  # not yet put

    def add(self, request: Request, outlet: Outlet | None) -> None:
        """outlet: where the tokens and the end of a request are told; None: nowhere."""
        if outlet is None:
            self._only, self._silent = None, True
            return
        same = not self._outlets or outlet is self._only
        self._only = outlet if same and not self._silent else None
        self._outlets[request] = outlet

    def waiting(self) -> tuple[Request, ...]:
        """The requests whose end somebody waits for."""
        return tuple(self._outlets)

    def tell(self, requests: Iterable[Request]) -> None:
        """Note how far these have come, for the readers who want to know."""
        for request in requests:
            outlet, ended = self._outlets.get(request), request.finish_reason is not None
            if outlet is not None and (ended or outlet.every_step):
                self._news.setdefault(outlet, []).append(Progress(request, request.num_generated, ended))
                if ended:
                    del self._outlets[request]

    def tell_going(self, requests: Sequence[Request]) -> None:
        """`tell`, of requests that have not ended: most of a long run, and mostly to a single reader."""
        only = self._only
        if only is None or only in self._news:
            self.tell(requests)
        elif only.every_step:
            new = tuple.__new__  # half the time of the class's own
            self._news[only] = [
                new(Progress, (request, request.num_tokens - request.num_prompt, False)) for request in requests
            ]

    def put(self) -> None:
        """Give the readers what is noted."""
        news, self._news = self._news, {}
        for outlet, own in news.items():
            outlet.put(own)
