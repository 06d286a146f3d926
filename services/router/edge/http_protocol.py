"""Limits on the socket: uvicorn's HTTP protocol with bounds on size and time of each request and response.

uvicorn bounds neither the size of a request head nor the time that it takes. Here each part has a limit:

    connected -> head: `HEAD_TIMEOUT_S`, `MAX_HEAD_BYTES` -> body: `MESSAGE_TIMEOUT_S` -> next head ...
    response: `WRITE_TIMEOUT_S` without a byte that the client accepts

The application bounds the size of the body (`body`). Here only bytes are bounded that it never gets: chunk extensions,
trailers, and the rest of a refused body (`lingering_close`). Knows no path and no settings.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from functools import partial

import httptools
import structlog
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.services.router.edge.disconnect import CONNECTION
from baton.services.router.edge.http_errors import HeadTooLarge, HeadTooSlow, MalformedHttp, error_response
from baton.services.router.edge.lingering_close import LingeringTransport
from baton.services.router.edge.middleware import new_request_id
from baton.services.router.edge.sink import BODY_SINK
from baton.services.router.edge.transport_sink import TransportSink
from baton.telemetry import metrics

MAX_HEAD_BYTES = 64 * 1024
"""Limit of request line and headers together, and of consecutive bytes that are not part of a body."""

HEAD_TIMEOUT_S = 20.0
"""From the connection, or the first byte of a request, to the end of its headers."""

MESSAGE_TIMEOUT_S = 65.0
"""From there to the end of the body. Longer than the limit of the application, `body.READ_TIMEOUT_S`."""

WRITE_TIMEOUT_S = 30.0
"""Longest time in which a client accepts no byte of a response that waits in the transport (at most 64 KiB)."""

_WRITE_CHECKS = 6
"""Checks within `WRITE_TIMEOUT_S`."""

log = structlog.get_logger(__name__)

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
    _next_timeout_s: float | None = None  # of the part that the bytes received now end in; most hold a whole request
    _rejection: HeadTooLarge | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _num_unsent_bytes = 0  # at the last check
    _num_stalled_checks = 0
    on_writable: Callable[[], None] | None = None  # of the response that is written
    too_slow = False  # see `RequestConnection`
    lost = False  # the same
    on_lost: Callable[[], None] | None = None  # the same

    # --- the transport's callbacks ---
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of the first request."""
        super().connection_made(transport)
        self._closing = LingeringTransport(transport, lambda: self._read_state is _ReadState.NOTHING)
        self._start_timer(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        self._cancel_timer()
        self._closing.on_lost()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)
        self.lost = True
        if self.on_writable is not None:
            self.on_writable()
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        """The transport is full: the response waits."""
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        """The client has accepted bytes."""
        self._num_stalled_checks = 0
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def data_received(self, data: bytes) -> None:
        """Parses bytes of one or several messages."""
        if self._closing.lingering:
            self._closing.drop(len(data))
            return
        if self.transport.is_closing():
            return
        self._next_timeout_s = HEAD_TIMEOUT_S if self._timer is None else None
        self._num_overhead_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._reject(self._rejection or MalformedHttp("this is not an HTTP request"))
        if self._num_overhead_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject(_head_too_large())
        if self._next_timeout_s is not None and not self.transport.is_closing():
            self._start_timer(self._next_timeout_s)

    # --- the parser's callbacks ---
    def on_message_begin(self) -> None:
        """First byte of a request."""
        super().on_message_begin()
        self._read_state = _ReadState.HEAD
        self._next_timeout_s = HEAD_TIMEOUT_S

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
        self._next_timeout_s = MESSAGE_TIMEOUT_S
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
        super().on_headers_complete()
        self.cycle.transport = self._closing  # type: ignore[assignment]
        if self.scope["method"] != "HEAD":
            sink = TransportSink(self.cycle, self)
            self.scope["extensions"][BODY_SINK] = sink  # type: ignore[assignment]

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
        self._next_timeout_s = None
        self._cancel_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End of a response; what the transport still holds must be accepted in time."""
        self._closing.flush()
        if self.transport.get_write_buffer_size():
            self._watch_writes()
        if self._closing.lingering:
            self._cancel_timer()
            self.flow.resume_reading()  # to read the rest of the body, up to the client's close
            return
        super().on_response_complete()

    def hold(self) -> None:
        """See `WritableConnection`."""
        self._closing.hold()

    def has_body(self, scope: Scope) -> bool:
        """See `RequestConnection`. A pipelined request behind it has a cycle of its own: then this one is not told."""
        cycle = self.cycle
        return cycle is not None and cycle.scope is scope and not cycle.more_body

    def hang_up(self) -> None:
        """See `RequestConnection`."""
        if not self.too_slow:
            self.too_slow = True
            metrics.HUNG_UP_CLIENTS_TOTAL.inc()
            log.warning("client_too_slow", unsent_bytes=self.transport.get_write_buffer_size())
            self.transport.abort()
            if self._answering:
                self.cycle.disconnected = True  # before `connection_lost`: uvicorn expects no end of the response
                self.cycle.message_event.set()

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
        self._next_timeout_s = None
        if not self._answering:
            reply = error_response(error)
            metrics.HTTP_RESPONSES_TOTAL.labels("none", str(reply.status)).inc()
            self._closing.write(_response(reply.status, reply.json()))
            self._closing.close()
        else:
            self.transport.close()

    def _watch_writes(self) -> None:
        """Checks from now on that the client accepts bytes, until the transport is empty or the response goes on."""
        if self._write_timer is None:
            self._num_unsent_bytes, self._num_stalled_checks = self.transport.get_write_buffer_size(), 0
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S / _WRITE_CHECKS, self._check_writes)

    def _check_writes(self) -> None:
        self._write_timer = None
        before, self._num_unsent_bytes = self._num_unsent_bytes, self.transport.get_write_buffer_size()
        if not self._num_unsent_bytes or not (self.flow.write_paused or not self._answering):
            return  # the application writes again: the transport pauses it once more if the client does not read
        self._num_stalled_checks = 0 if self._num_unsent_bytes < before else self._num_stalled_checks + 1
        if self._num_stalled_checks >= _WRITE_CHECKS:
            self.hang_up()
        else:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S / _WRITE_CHECKS, self._check_writes)

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
