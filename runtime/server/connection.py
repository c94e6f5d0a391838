"""uvicorn's HTTP/1.1 with limits on how long a client may be silent or not read, and with refusals in OpenAI's form."""

import asyncio
import json
import secrets
import socket

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ingot.runtime.server.api_error import ApiError, malformed
from ingot.runtime.server.request_log import RequestLog

_SEND_BUFFER = 128 << 10  # bytes that the kernel keeps for a client that does not read
_AHEAD = 64 << 10  # bytes of further requests that are kept while one is answered
_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0  # seconds between looks at a client that sends no more, growing
_CLOSED = 7  # TCP_CLOSE of Linux: the other side has answered with a reset


class Parser(h11.Connection):
    """h11, which also refuses what RFC 9112 (6.1) lets a server refuse: two lengths of one body, the way to smuggle a
    request past a proxy that believes the other one. `complaint`: why it cannot read on. `method`: of the request."""

    complaint: h11.RemoteProtocolError | None = None
    method = b""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11.Connection."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.method = event.method
                _check_framing(event)
        except h11.RemoteProtocolError as error:
            self.complaint = error
            raise
        return event


def _check_framing(request: h11.Request) -> None:
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding exclude each other")
    if request.http_version < b"1.1":
        raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")


class Connection(H11Protocol):
    """Cuts clients that begin a request and do not go on, and clients that do not read. The state
    of the scope then has `deaf`, and `refusal`, what was answered, where a body is not HTTP.

    head_timeout   seconds for the head of a request to arrive
    write_timeout  seconds for the client to read what was sent
    log            counts and logs requests that cannot be read
    """

    head_timeout: float
    write_timeout: float
    log: RequestLog
    _silent: asyncio.TimerHandle | None = None
    _deaf: asyncio.TimerHandle | None = None
    _half_closed = False  # the client sends no more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        self.conn: Parser = Parser(h11.SERVER)
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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays: a client may end its side once its request is out, and wait for the answer.

        A client that has gone looks the same, until something is sent to it: it answers with a reset. So this sends
        what every client of HTTP/1.1 must be able to skip, and then looks for the reset.
        """
        if not self._is_answering() or self.cycle.more_body:
            return False
        if not self._half_closed:
            self._half_closed = True
            if self.conn.our_state is h11.SEND_RESPONSE and self.cycle.scope["http_version"] == "1.1":
                probe = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
                self.transport.write(self.conn.send(probe))
            self._look_for_reset(_FIRST_LOOK)
        return True

    def handle_events(self) -> None:
        """uvicorn does not read while a further request waits, and would not see its client leave."""
        super().handle_events()
        if not self._is_answering():
            return
        self._forget_head()
        if not self.cycle.more_body and len(self.conn.trailing_data[0]) < _AHEAD:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """See uvicorn. After the last answer to a client that sends no more, the connection has no use."""
        super().on_response_complete()
        if self._half_closed and not self._is_answering():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, and close. If an answer has begun, close without another one."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            assert self.conn.complaint is not None, "only the parser's complaints lead here"
            self._refuse(malformed(str(self.conn.complaint), self.conn.complaint.error_status_hint))
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

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Send an error; count and log it, here or, where a request waits for the rest of its body, with that."""
        request_id, body = secrets.token_hex(12), json.dumps(error.body()).encode()
        if self._is_answering():
            state = self.cycle.scope["state"]
            request_id = state["caller"].request_id if "caller" in state else request_id
            state["refusal"] = error
            self.cycle.disconnected = True  # it must not answer too
            self.cycle.message_event.set()
        else:
            fields = {"reason": error.message}
            self.log.note(error.code or "", route="other", status=error.status, request_id=request_id, fields=fields)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-request-id", request_id),
        ]
        head = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
        self.transport.write(self.conn.send(head))
        if self.conn.method != b"HEAD":
            self.transport.write(self.conn.send(h11.Data(data=body)))

    def _look_for_reset(self, seconds: float) -> None:
        """Again and again until the last answer is out: nobody reads from the socket any more, so nobody is told."""
        if self.transport.is_closing():
            return
        state = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state == _CLOSED:
            self.transport.abort()
            return
        self.loop.call_later(seconds, self._look_for_reset, min(2 * seconds, _LAST_LOOK))

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


def connection(*, head_seconds: float, write_seconds: float, request_log: RequestLog) -> type[Connection]:
    """A class, as uvicorn wants it."""

    class Limited(Connection):
        head_timeout, write_timeout, log = head_seconds, write_seconds, request_log

    return Limited
