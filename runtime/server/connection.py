"""uvicorn's HTTP/1.1, with limits on how long a client may be silent or deaf, and no deafness of its own."""

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_SEND_BUFFER = 128 << 10  # bytes that the kernel keeps for a client that does not read
_AHEAD = 64 << 10  # bytes of further requests that are kept while one is answered


class Connection(H11Protocol):
    """Cuts whoever begins a request and does not go on, and whoever does not read. The answer finds the latter as
    `deaf` in the state of its scope.

    head_timeout   seconds for the head of a request to arrive
    write_timeout  seconds for the client to read what was sent
    """

    head_timeout: float
    write_timeout: float
    _silent: asyncio.TimerHandle | None = None
    _deaf: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._forget_head()
        if self._deaf is not None:
            self._deaf.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._expect_head()
        super().data_received(data)

    def handle_events(self) -> None:
        """uvicorn does not read while a further request waits, and would not see its client leave."""
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete:
            return
        self._forget_head()
        if not self.cycle.more_body and len(self.conn.trailing_data[0]) < _AHEAD:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Where an answer has begun, there is no place for another one."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._deaf = self.loop.call_later(self.write_timeout, self._cut_deaf)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        if self._deaf is not None:
            self._deaf.cancel()

    def _expect_head(self) -> None:
        if self._silent is None:
            self._silent = self.loop.call_later(self.head_timeout, self.transport.abort)

    def _forget_head(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None

    def _cut_deaf(self) -> None:
        self.scope["state"]["deaf"] = True
        self.transport.abort()


def connection(head_seconds: float, write_seconds: float) -> type[Connection]:
    """A class, as uvicorn wants it."""

    class Limited(Connection):
        head_timeout, write_timeout = head_seconds, write_seconds

    return Limited
