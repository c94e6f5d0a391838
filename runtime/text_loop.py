"""Text from an engine with two threads of its own: while one computes a step, the other turns the last one into text.

    submit ──▶ executor ──steps──▶ tokens ──detokenise──▶ sink(event)      cancel: from anywhere, at once
                  step thread            text thread

Both sleep while there is nothing to do, and begin with the first request.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from ingot.errors import IngotError, RequestError
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.owned import Owned
from ingot.runtime.request import FinishReason
from ingot.runtime.text_stream import News, TextEvent, TextStream
from ingot.runtime.tokenizer import Tokenizer

Sink = Callable[[TextEvent], None]
"""Called on the text thread with each event; must be quick."""


class TextLoop(Owned):
    """Thread-safe. Does not own the runner.

    failure  why a thread ended that should not have ended, in words
    turning  since when (time.monotonic()) the text thread has been at one piece of text; None: it waits
    """

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.runner, self.tokenizer = runner, tokenizer
        self._sinks: dict[TextStream, Sink] = {}
        self._threads: list[threading.Thread] = []
        self._door = threading.Lock()  # who submits is in before it closes, or finds it closed
        self._closed = False
        self.failure: str | None = None
        self.turning: float | None = None

    def submit(self, streams: Sequence[TextStream], sink: Sink) -> None:
        """Queue the requests of streams. Raises, before any is queued, if one can never run."""
        self.runner.executor.require_ready()
        with self._door:
            self._start()
            self._sinks.update((stream, sink) for stream in streams)
            try:
                self.runner.executor.add([stream.request for stream in streams])
            except BaseException:
                self._forget(streams)
                raise

    def cancel(self, streams: Sequence[TextStream]) -> None:
        """Abort what still runs; blocks are free when this returns, and at most one more event is under way."""
        self._forget(streams)
        self.runner.executor.abort([stream.request for stream in streams])

    def close(self) -> None:
        """Fail everything that runs and end both threads, after the step that runs. Closing twice is fine."""
        if not self.is_here:
            return
        self.runner.executor.require_ready()
        with self._door:
            self._closed = True
        error = RequestError("the LLM was closed before the request ended")
        self.runner.executor.abort([stream.request for stream in tuple(self._sinks)], error)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        if self._closed:
            raise RequestError("the LLM is closed", got=self.failure, hint="make a new one")
        if not self._threads:
            for work in (self._step, self._write):
                self._threads.append(threading.Thread(target=work, name=f"ingot {work.__name__}", daemon=True))
            for thread in self._threads:
                thread.start()

    def _forget(self, streams: Sequence[TextStream]) -> None:
        for stream in streams:
            self._sinks.pop(stream, None)

    def _step(self) -> None:
        try:
            self.runner.executor.run_until(lambda: self._closed)
        except BaseException as error:  # whoever waits for events must not wait for ever
            self._die("step", error)
            raise

    def _write(self) -> None:
        try:
            self._write_until_closed()
        except BaseException as error:
            self._die("text", error)
            for stream, sink in tuple(self._sinks.items()):
                with contextlib.suppress(Exception):
                    sink(_failed(stream, RequestError("the text thread failed", got=repr(error))))
            self._sinks.clear()
            raise

    def _die(self, thread: str, error: BaseException) -> None:
        self.failure = f"the {thread} loop has died: {error!r}"
        with self._door:
            self._closed = True
        for stream in tuple(self._sinks):
            with contextlib.suppress(Exception):  # what broke the step may break this too
                failed = RequestError(f"the {thread} thread failed", got=repr(error))
                self.runner.executor.abort([stream.request], failed)
        self.runner.executor.wake()

    def _write_until_closed(self) -> None:
        while True:
            news = self.runner.executor.wait(
                lambda: (self._closed and not self._sinks) or any(stream.has_news() for stream in tuple(self._sinks)),
                lambda: [(stream, stream.take()) for stream in tuple(self._sinks) if stream.has_news()],
                steps=False,
            )
            if not news:
                return
            for stream, taken in news:
                self.turning = time.monotonic()
                event = self._event(stream, taken)
                sink = self._sinks.get(stream)
                if stream.done:
                    self.runner.executor.abort([stream.request])
                    self._forget([stream])
                if sink is not None:
                    sink(event)
            self.turning = None

    @staticmethod
    def _event(stream: TextStream, taken: News) -> TextEvent:
        """What goes wrong with the text of one request ends that request only."""
        try:
            return stream.event(taken)
        except BaseException as error:  # a panic of the tokenizer's library is no Exception
            stream.done = True
            return _failed(stream, RequestError("the tokens cannot be turned into text", got=repr(error)))


def _failed(stream: TextStream, error: IngotError) -> TextEvent:
    return TextEvent(index=stream.index, sequence=stream.sequence, finish_reason=FinishReason.ABORT, error=error)
