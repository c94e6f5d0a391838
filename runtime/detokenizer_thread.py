"""Text from an engine: while its thread computes a step, a thread of this loop turns the last one's tokens into text.

    submit ──▶ executor ──▶ outlet ──▶ detokenise ──▶ sink(events)      cancel: from anywhere, at once
            engine thread            text thread

The thread sleeps while there is nothing to do. No lock decides who comes first, a request or `close`: `close` ends
every request that it finds, and a request that came later finds `_closed` set.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from ingot.errors import RequestError
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Outlet, StreamDelta
from ingot.runtime.owned import Owned, start_thread
from ingot.runtime.request import Request
from ingot.runtime.text_stream import TextEvent, TextStream
from ingot.runtime.tokenizer import Tokenizer

Sink = Callable[[TextEvent], None]
"""Called on the text thread with each event; must be quick."""


def _nobody() -> None:
    pass


class DetokenizerThread(Owned):
    """Thread-safe. Does not own the runner.

    busy_since  since when (time.monotonic()) the text thread has been at one piece of text; None: it waits
    """

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, on_pause: Callable[[], None] = _nobody) -> None:
        """Start the thread. Raises RequestError if the system has none.

        on_pause: called on the text thread when the events of a step are out.
        """
        super().__init__()
        self.runner, self.tokenizer = runner, tokenizer
        self._on_pause = on_pause
        self._outlet = Outlet()
        self._open: dict[Request, tuple[TextStream, Sink]] = {}
        self._thread = threading.Thread(target=self._write, name="ingot text", daemon=True)
        self._closed = False
        self._failure: str | None = None
        self.busy_since: float | None = None
        start_thread(self._thread)

    @property
    def failure(self) -> str | None:
        """Why a thread ended that should not have ended, in words."""
        return self.runner.executor.failure or self._failure

    def submit(self, streams: Sequence[TextStream], sink: Sink) -> None:
        """Queue the requests of streams. Raises, before any is queued, if one can never run."""
        self.runner.executor.require_ready()
        self._require_open()
        self._open.update((stream.request, (stream, sink)) for stream in streams)
        try:
            self.runner.executor.add([stream.request for stream in streams], self._outlet)
            self._require_open()
        except BaseException:
            self.cancel(streams)
            raise

    def cancel(self, streams: Sequence[TextStream]) -> None:
        """Abort what still runs, after the step that runs; at most one more event is under way. Waits for nothing."""
        self._forget(streams)
        self.runner.executor.abort([stream.request for stream in streams])

    def close(self) -> None:
        """Fail everything that runs and end the thread, after the step that runs. Closing twice is fine."""
        if not self.is_here:
            return
        self.runner.executor.require_ready()
        self._closed = True  # before the look at what is open
        self.runner.executor.abort(tuple(self._open), RequestError("the LLM was closed before the request ended"))
        self._outlet.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("the LLM is closed", got=self.failure, hint="make a new one")

    def _forget(self, streams: Sequence[TextStream]) -> None:
        for stream in streams:
            self._open.pop(stream.request, None)
        if self._closed:  # the thread may have waited for these alone
            self._outlet.wake()

    def _write(self) -> None:
        try:
            while self._open or not self._closed:
                self._tell(self._outlet.get_all())
        except BaseException as error:
            self._die(error)
            raise

    def _tell(self, news: StreamDelta) -> None:
        for progress in news:
            if (found := self._open.get(progress.request)) is None:
                continue
            stream, sink = found
            self.busy_since = time.monotonic()
            event = stream.next_event(progress)
            if stream.done:
                self.cancel([stream])
            sink(event)
        self.busy_since = None
        self._on_pause()

    def _die(self, error: BaseException) -> None:
        self._failure = f"the text thread has died, which is a bug of ingot: {error!r}"
        self._closed = True  # before the look at what is open
        failed = RequestError("the text thread failed", got=repr(error))
        self.runner.executor.abort(tuple(self._open), failed)
        for stream, sink in tuple(self._open.values()):
            with contextlib.suppress(Exception):
                sink(stream.failed_event(failed))
        self._open.clear()
        self._on_pause()
