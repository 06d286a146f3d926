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
from services.router.api.envelope import new_request_id
from services.router.api.http_errors import HeadTooLarge, HeadTooSlow, MalformedHttp, reply_to

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; also most bytes of a message in a row that are no part of its body."""

HEAD_TIMEOUT_S = 20.0
"""From the connection, or a request's first byte, to the end of its headers."""

MESSAGE_TIMEOUT_S = 65.0
"""From there to the end of the body; a little longer than the application waits for it."""


_OFFER_HEADERS = (b"connection", b"upgrade", b"http2-settings")


class _Part(enum.Enum):
    """What of a request comes next."""

    NOTHING = "nothing"  # between requests: uvicorn's keep-alive bounds the time
    HEAD = "head"
    BODY = "body"


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Its callbacks run on the event loop, in the order of the bytes."""

    _part = _Part.NOTHING
    _num_unseen_bytes = 0  # of the message under way, since the last part of it that meant something
    _timer: asyncio.TimerHandle | None = None
    _refusal: HeadTooLarge | None = None

    # --- the transport's callbacks ---
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Gives the first request its time."""
        super().connection_made(transport)
        self._arm(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing fires any more."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Any part of a message, or several."""
        if self.transport.is_closing():
            return
        if self._timer is None:
            self._arm(HEAD_TIMEOUT_S)
        self._num_unseen_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or MalformedHttp("this is not an HTTP request"))
        if self._num_unseen_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_head_too_large())

    # --- the parser's callbacks ---
    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._part = _Part.HEAD
        self._arm(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        """Starts the application, unless all came in one piece that is too large, or asks for another protocol."""
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._refusal = _head_too_large()
            raise self._refusal  # the parser stops, and `data_received` answers
        if self.parser.should_upgrade():
            return
        self._num_unseen_bytes = 0
        self._part = _Part.BODY
        self._arm(MESSAGE_TIMEOUT_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        self._num_unseen_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come; the application has the time it wants."""
        if self.parser.should_upgrade():
            return
        self._num_unseen_bytes = 0
        self._part = _Part.NOTHING
        self._disarm()
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
                head = self._head_without_offer()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)
                rest = rest[stop.args[0] :]

    def _head_without_offer(self) -> bytes:
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] not in _OFFER_HEADERS]
        return b"".join([line, *kept, b"\r\n"])

    # --- ends ---
    def _refuse(self, error: Exception) -> None:
        """Answers what no application has answered, and closes. A running answer is only broken off."""
        self._disarm()
        if not self._answering:
            reply = reply_to(error)
            metrics.HTTP_RESPONSES_TOTAL.labels("none", str(reply.status)).inc()
            self.transport.write(_response(reply.status, reply.json()))
        self.transport.close()

    def _too_late(self, part: Callable[[], None]) -> None:
        self._timer = None
        if self._answering or self.flow.read_paused:
            part()  # not the client is slow: we are, or do not listen
        elif self._part is _Part.HEAD:
            self._refuse(HeadTooSlow(f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s"))
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self, timeout_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(timeout_s, self._too_late, partial(self._arm, timeout_s))

    def _disarm(self) -> None:
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
