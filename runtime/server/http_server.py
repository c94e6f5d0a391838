"""uvicorn with the manners that a server of long answers needs: a first signal drains, a second one ends at once.

SIGTERM, SIGINT, SIGHUP, SIGUSR1 ─▶ new requests: 503, readiness: 503 ─▶ running ones end in drain_timeout ─▶ exit 0
"""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn

from ingot.runtime.server.api_error import shutting_down
from ingot.runtime.server.application import make_app
from ingot.runtime.server.connection import connection
from ingot.runtime.server.service import Service

_LOG = logging.getLogger("ingot.server")
_LAST_WORDS = 2.0  # seconds at most in which answers that were cut short are sent
_LAST_LOOK = 5.0  # seconds in which a server whose engine thread died still tells why it is not ready


class HttpServer(uvicorn.Server):
    """Runs the app on the loop of its service. `on_start` gets the address once it listens."""

    def __init__(self, service: Service, on_start: Callable[[str, int], None]) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                make_app(service),
                host=config.host,
                port=config.port,
                http=connection(
                    head_seconds=config.body_timeout, write_seconds=config.write_timeout, request_log=service.log
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=2048,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=round(_LAST_WORDS) + 1,
            )
        )
        self._service, self._on_start = service, on_start
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.exit_code = 0

    async def startup(self, sockets: object = None) -> None:
        """Listen, then say where."""
        await super().startup()
        if self.started:
            address = self.servers[0].sockets[0].getsockname()
            self._on_start(address[0], address[1])
            self._watch = asyncio.create_task(self._watch_over())

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """SIGHUP too, which a closed terminal sends; where nohup has it ignored, it stays so. And SIGUSR1, which mpirun
        hands on to its ranks."""
        with super().capture_signals(), contextlib.ExitStack() as restoring:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGHUP, signal.SIGUSR1):
                    before = signal.getsignal(number)
                    if number != signal.SIGHUP or before is not signal.SIG_IGN:
                        signal.signal(number, self.handle_exit)
                        restoring.callback(signal.signal, number, before)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """One of these signals, in the middle of anything."""
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """End in good manner; called again: end now."""
        if self._draining is not None:
            self._service.end_all(shutting_down(1))
            self.should_exit = self.force_exit = True
            return
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        _LOG.info(
            "the server takes no new requests; running ones, which get at most %g s (--drain_timeout): %d",
            self._service.config.drain_timeout,
            len(self._service.active),
        )
        if not await self._service.drain():
            _LOG.warning(
                "requests cut short, because they did not end within --drain_timeout: %d", len(self._service.active)
            )
            self._service.end_all(shutting_down(1))
            await self._service.is_idle(_LAST_WORDS)
        self.should_exit = True

    async def _watch_over(self) -> None:
        """End with code 1 when a thread has died, after its requests were told."""
        await self._service.failed.wait()
        _LOG.error("%s; the server ends with exit code 1, start it again", self._service.texts.failure)
        await asyncio.sleep(_LAST_LOOK)
        self.exit_code = 1
        self.should_exit = True
