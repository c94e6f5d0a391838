"""Events from the text thread to the event loop: a step wakes the loop once, however many events it brings.

text thread    put ─▶ [event event event]   wake: all of them in one callback ─▶ event loop
event loop     deliver ─▶ queue of a request ─▶ drain: a slow reader finds all of them at once; they never hold more
                                                than the tokens that its own request asked for

Each side has its own lists. What crosses is a callback of the event loop, with the events of a step.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque

from ingot.runtime.text_stream import TextEvent

_AT_ONCE = 256  # events


class LoopBridge:
    """Carries events of the text thread to an event loop, those of a step with one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._gathered: list[tuple[EventQueue, float, TextEvent]] = []

    def gather(self, queue: "EventQueue", event: TextEvent) -> None:
        """Have `event` delivered with the next wake-up. On the text thread."""
        self._gathered.append((queue, time.monotonic(), event))

    def wake(self) -> None:
        """Let the loop deliver soon what was gathered, if there is anything. On the text thread."""
        if self._gathered:
            gathered, self._gathered = self._gathered, []
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(_deliver, gathered)


def _deliver(gathered: "list[tuple[EventQueue, float, TextEvent]]") -> None:
    for queue, when, event in gathered:
        queue.deliver(when, event)


class LoopBridges:
    """The bridges to all event loops that wait for one engine's events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bridges: dict[asyncio.AbstractEventLoop, LoopBridge] = {}

    def here(self) -> LoopBridge:
        """The bridge to the loop that runs on this thread."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._bridges = {each: bridge for each, bridge in self._bridges.items() if not each.is_closed()}
            return self._bridges.setdefault(loop, LoopBridge(loop))

    def wake(self) -> None:
        """`LoopBridge.wake` of each."""
        with self._lock:
            bridges = list(self._bridges.values())
        for bridge in bridges:
            bridge.wake()


class EventQueue:
    """The events of one request. All but `put` belongs to the event loop.

    stopped  done when somebody interrupts, with the error
    """

    def __init__(self, bridge: LoopBridge) -> None:
        self._bridge = bridge
        self._events: deque[tuple[float, TextEvent]] = deque()
        self._news = asyncio.Event()
        self.stopped: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def put(self, event: TextEvent) -> None:
        """From the text thread; the reader hears of it with the next `LoopBridge.wake`."""
        self._bridge.gather(self, event)

    def deliver(self, when: float, event: TextEvent) -> None:
        """For the bridge. when: the event arrived on the text thread, by time.monotonic()."""
        self._events.append((when, event))
        self._news.set()

    async def drain(self) -> list[tuple[float, TextEvent]]:
        """What came since the last call with the time of its arrival, at most 256 events, as soon as there is anything;
        nothing after `poke`. Raises what `interrupt` was given."""
        if self._news.is_set():
            await asyncio.sleep(0)  # others have their turn, however much there is to take
        await self._news.wait()
        if self.stopped.done():
            raise self.stopped.result()
        events = [self._events.popleft() for _ in range(min(len(self._events), _AT_ONCE))]
        if not self._events:
            self._news.clear()
        return events

    def interrupt(self, error: Exception) -> None:
        """End the wait with an error, whatever arrived; the first one counts."""
        if not self.stopped.done():
            self.stopped.set_result(error)
        self._news.set()

    def poke(self) -> None:
        """Let the reader look up."""
        self._news.set()
