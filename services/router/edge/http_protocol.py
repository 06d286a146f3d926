"""HTTP on the socket: uvicorn's protocol with bounds on what a client may send before the application is asked.

uvicorn bounds neither a request's head nor the time that it takes, so one client could fill the memory with a header
without end, or hold a connection open for ever. Here a request has its parts in time and size:

    connected -> head: `HEAD_TIMEOUT_S`, `MAX_HEAD_BYTES` -> body: `MESSAGE_TIMEOUT_S` -> head of the next one ...

How large a body may be is the application's business (`body`); what is bounded of it here is what the application does
not see: chunk extensions, trailers, and the rest of a body that it has refused. `app` gives the class to uvicorn.
Knows no path and no settings.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from functools import partial

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.telemetry import metrics
from services.router.edge.http_errors import HeadTooLarge, HeadTooSlow, MalformedHttp, error_response
from services.router.edge.middleware import new_request_id

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; also most bytes of a message in a row that are no part of its body."""

HEAD_TIMEOUT_S = 20.0
"""From the connection, or a request's first byte, to the end of its headers."""

MESSAGE_TIMEOUT_S = 65.0
"""From there to the end of the body; a little longer than the application waits for it."""


_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")


class _ReadState(enum.Enum):
    """What of a request comes next."""

    NOTHING = "nothing"  # between requests: uvicorn's keep-alive bounds the time
    HEAD = "head"
    BODY = "body"


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Its callbacks run on the event loop, in the order of the bytes."""

    _read_state = _ReadState.NOTHING
    _num_overhead_bytes = 0  # of the message under way, since the last part of it that meant something
    _timer: asyncio.TimerHandle | None = None
    _rejection: HeadTooLarge | None = None

    # --- the transport's callbacks ---
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Gives the first request its time."""
        super().connection_made(transport)
        self._start_timer(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing fires any more."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Any part of a message, or several."""
        if self.transport.is_closing():
            return
        if self._timer is None:
            self._start_timer(HEAD_TIMEOUT_S)
        self._num_overhead_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._reject(self._rejection or MalformedHttp("this is not an HTTP request"))
        if self._num_overhead_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject(_head_too_large())

    # --- the parser's callbacks ---
    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._read_state = _ReadState.HEAD
        self._start_timer(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        """Starts the application, unless all came in one piece that is too large, or asks for another protocol."""
        num_bytes = len(self.url)
        for name, value in self.headers:
            num_bytes += len(name) + len(value)
        if num_bytes > MAX_HEAD_BYTES:
            self._rejection = _head_too_large()
            raise self._rejection  # the parser stops, and `data_received` answers
        if self.parser.should_upgrade():
            return
        self._num_overhead_bytes = 0
        self._read_state = _ReadState.BODY
        self._start_timer(MESSAGE_TIMEOUT_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        self._num_overhead_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come; the application has the time it wants."""
        if self.parser.should_upgrade():
            return
        self._num_overhead_bytes = 0
        self._read_state = _ReadState.NOTHING
        self._cancel_timer()
        super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        """Raises `HttpParserError`. A client that offers another protocol is answered in this one.

        The parser stops after such a head, the body unread; a new one goes on from the head without the offer.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                if all(name != b"upgrade" for name, _ in self.headers):  # CONNECT: this is no proxy
                    raise httptools.HttpParserError("nothing to go on with") from None
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)
                rest = rest[stop.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] not in _UPGRADE_HEADERS]
        return b"".join([line, *kept, b"\r\n"])

    # --- ends ---
    def _reject(self, error: Exception) -> None:
        """Answers what no application has answered, and closes. A running answer is only broken off."""
        self._cancel_timer()
        if not self._answering:
            reply = error_response(error)
            metrics.HTTP_RESPONSES_TOTAL.labels("none", str(reply.status)).inc()
            self.transport.write(_response(reply.status, reply.json()))
        self.transport.close()

    def _on_timeout(self, part: Callable[[], None]) -> None:
        self._timer = None
        if self._answering or self.flow.read_paused:
            part()  # not the client is slow: we are, or do not listen
        elif self._read_state is _ReadState.HEAD:
            self._reject(HeadTooSlow(f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s"))
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self, timeout_s: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(timeout_s, self._on_timeout, partial(self._start_timer, timeout_s))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"a request's head may have {MAX_HEAD_BYTES} bytes")


def _response(status: int, body: bytes) -> bytes:
    headers = (
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {new_request_id()}",
        "connection: close",
    )
    return STATUS_LINE[status] + "\r\n".join([*headers, "", ""]).encode() + body
