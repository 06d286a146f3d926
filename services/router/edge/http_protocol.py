"""Limits on the socket: uvicorn's HTTP protocol with bounds on size and time of each request.

uvicorn bounds neither the size of a request head nor the time that it takes. Here each part has a limit:

    connected -> head: `HEAD_TIMEOUT_S`, `MAX_HEAD_BYTES` -> body: `MESSAGE_TIMEOUT_S` -> next head ...

The application bounds the size of the body (`body`). Here only bytes are bounded that it never gets: chunk extensions,
trailers, and the rest of a refused body. Knows no path and no settings.
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
"""Limit of request line and headers together, and of consecutive bytes that are not part of a body."""

HEAD_TIMEOUT_S = 20.0
"""From the connection, or the first byte of a request, to the end of its headers."""

MESSAGE_TIMEOUT_S = 65.0
"""From there to the end of the body. Longer than the limit of the application, `body.READ_TIMEOUT_S`."""


_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")


class _ReadState(enum.Enum):
    """The part of a request that is read next."""

    NOTHING = "nothing"  # between requests: uvicorn's keep-alive bounds the time
    HEAD = "head"
    BODY = "body"


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Its callbacks run on the event loop, in the order of the bytes."""

    _read_state = _ReadState.NOTHING
    _num_overhead_bytes = 0  # bytes since the last part of a body
    _timer: asyncio.TimerHandle | None = None
    _rejection: HeadTooLarge | None = None

    # --- the transport's callbacks ---
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of the first request."""
        super().connection_made(transport)
        self._start_timer(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses bytes of one or several messages."""
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
        """First byte of a request."""
        super().on_message_begin()
        self._read_state = _ReadState.HEAD
        self._start_timer(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        """Starts the application, unless the head is too large or asks for another protocol."""
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
        """A part of the body."""
        self._num_overhead_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End of the request. The application has no time limit here."""
        if self.parser.should_upgrade():
            return
        self._num_overhead_bytes = 0
        self._read_state = _ReadState.NOTHING
        self._cancel_timer()
        super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        """Feeds the parser. Answers a request for another protocol in HTTP/1.1. Raises `HttpParserError`.

        The parser stops after such a head. A new one continues from the head without the upgrade headers.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                if all(name != b"upgrade" for name, _ in self.headers):  # CONNECT
                    raise httptools.HttpParserError("CONNECT is not supported") from None
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
        """Sends an error response and closes. If a response is running, only closes."""
        self._cancel_timer()
        if not self._answering:
            reply = error_response(error)
            metrics.HTTP_RESPONSES_TOTAL.labels("none", str(reply.status)).inc()
            self.transport.write(_response(reply.status, reply.json()))
        self.transport.close()

    def _on_timeout(self, part: Callable[[], None]) -> None:
        self._timer = None
        if self._answering or self.flow.read_paused:
            part()  # not the client is slow: the router is, or has paused reading
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
