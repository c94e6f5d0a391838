"""Events from the text thread to the event loop: a step wakes the loop once, however many events it brings.

text thread    put ─▶ [event event event]  pause   a slow reader finds all of them at once; they never hold more
event loop     drain ◀────── everything            than the tokens that its own request asked for
"""

import asyncio
import contextlib
import threading
import time
from collections import deque

from ingot.runtime.text_stream import TextEvent

_AT_ONCE = 256  # events


class LoopBridge:
    """Sets asyncio events from the text thread, many with one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._ready: list[asyncio.Event] = []
        self._under_way = False

    def mark(self, event: asyncio.Event) -> None:
        """Set `event` with the next wake-up."""
        with self._lock:
            self._ready.append(event)

    def wake(self) -> None:
        """Set all marked events soon, unless a wake-up that does so is under way."""
        with self._lock:
            needed = bool(self._ready) and not self._under_way
            self._under_way |= needed
        if needed:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
            self._under_way = False
        for event in ready:
            event.set()


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
    """The events of one request. `stopped`: done when somebody interrupts, with the error."""

    def __init__(self, bridge: LoopBridge) -> None:
        self._bridge = bridge
        self._lock = threading.Lock()
        self._events: deque[tuple[float, TextEvent]] = deque()
        self._news = asyncio.Event()
        self.stopped: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def put(self, event: TextEvent) -> None:
        """From the text thread; the reader hears of it with the next `LoopBridge.wake`."""
        with self._lock:
            self._events.append((time.monotonic(), event))
            first = len(self._events) == 1
        if first:
            self._bridge.mark(self._news)

    async def drain(self) -> list[tuple[float, TextEvent]]:
        """What came since the last call with the time of its arrival, at most 256 events, as soon as there is anything;
        nothing after `poke`. Raises what `interrupt` was given."""
        if self._news.is_set():
            await asyncio.sleep(0)  # others have their turn, however much there is to take
        await self._news.wait()
        if self.stopped.done():
            raise self.stopped.result()
        with self._lock:
            events = [self._events.popleft() for _ in range(min(len(self._events), _AT_ONCE))]
            if not self._events:
                self._news.clear()
        return events

    def interrupt(self, error: Exception) -> None:
        """End the wait with an error, whatever arrived; the first one counts. On the event loop."""
        if not self.stopped.done():
            self.stopped.set_result(error)
        self._news.set()

    def poke(self) -> None:
        """Let the reader look up. On the event loop."""
        self._news.set()
