"""Page connections of one link, on the reading side: kept open between reads, each used by one thread at a time."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from threading import Lock

from baton.domain.errors import LinkBroken
from baton.rpc.call_token import CallTokenIssuer
from baton.transfer.stream import page_wire
from baton.transfer.stream.host_lookup import HostLookup

CONNECT_S = 1.0
"""Longest wait for a connection to open, the lookup of its host included; the read goes on as a call then."""


class CannotConnect(LinkBroken):
    """No page connection could be opened."""


class ReadRefused(LinkBroken):
    """The source has refused a read."""


class PageConnection:
    """One connection. Raises `OSError` when it breaks; a broken one must be closed."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.num_reads = 0

    @property
    def usable(self) -> bool:
        """False if it has ended while it was idle, or its source has sent what nobody asked for."""
        return page_wire.is_quiet(self._socket)

    def request(self, token: bytes, body: bytes, num_bytes: int, deadline: float) -> None:
        """Asks for pages of `num_bytes`, and reads the head of the answer. Raises `ReadRefused` for another one."""
        self.num_reads += 1
        page_wire.send(self._socket, [page_wire.MAGIC, token, body], page_wire.time_left(deadline))
        kind, length = page_wire.HEAD.unpack(page_wire.receive(self._socket, page_wire.HEAD.size, deadline))
        if kind == page_wire.REFUSED and length <= page_wire.MAX_REASON_BYTES:
            reason = page_wire.receive(self._socket, length, deadline)
            raise ReadRefused(f"the source refuses: {reason.decode(errors='replace')}")
        if kind != page_wire.PAGES or length != num_bytes:
            raise ReadRefused(f"the answer has kind {kind} and {length} bytes, not {num_bytes}")

    def read_into(self, targets: Sequence[memoryview], deadline: float) -> None:
        """Fills `targets` with the next bytes of the answer."""
        page_wire.receive_into(self._socket, targets, deadline)

    def interrupt(self) -> None:
        """Ends a read of another thread, which closes the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class PageConnections:
    """The connections of a link to `address`. `request` lends one whose answer has begun."""

    def __init__(self, address: tuple[str, int], issuer: CallTokenIssuer) -> None:
        self._address = address
        self._host = HostLookup(*address)
        self._issuer = issuer
        self._lock = Lock()
        self._idle: list[PageConnection] = []
        self._lent: set[PageConnection] = set()
        self._closed = False

    @contextlib.contextmanager
    def request(self, body: bytes, num_bytes: int, deadline: float) -> Iterator[PageConnection]:
        """A connection for one read of `num_bytes`. It is kept if all is well with it afterwards.

        Raises `CannotConnect`, also if a new connection ends before an answer, `ReadRefused` or `OSError`.
        """
        connection = self._begin(body, num_bytes, deadline)
        intact = False
        try:
            yield connection
            intact = True
        finally:
            self._give_back(connection, intact=intact)

    def close(self) -> None:
        """Ends reads under way. Who reads closes the connection."""
        with self._lock:
            self._closed = True
            idle, lent = self._idle, list(self._lent)
            self._idle = []
        for connection in lent:
            connection.interrupt()
        for connection in idle:
            connection.close()

    def _begin(self, body: bytes, num_bytes: int, deadline: float) -> PageConnection:
        """A kept connection may have ended unseen: then another one is asked. A read changes nothing at the source."""
        while True:
            connection = self._take(deadline)
            was_kept, answered = connection.num_reads > 0, False
            try:
                connection.request(self._issuer.issue(page_wire.METHOD, body), body, num_bytes, deadline)
                answered = True
                return connection
            except (page_wire.ConnectionEnded, ConnectionResetError, BrokenPipeError) as error:
                if self._closed:
                    raise
                if not was_kept:  # the source is full, or a proxy on the way finds nobody behind it
                    raise CannotConnect(f"hung up on before an answer: {error}") from error
            finally:
                if not answered:
                    self._give_back(connection, intact=False)

    def _take(self, deadline: float) -> PageConnection:
        while (kept := self._take_kept()) is not None:
            if kept.usable:
                return kept
            self._give_back(kept, intact=False)
        connection = self._open(deadline)
        with self._lock:
            closed = self._closed
            if not closed:
                self._lent.add(connection)
        if closed:
            connection.close()
            raise CannotConnect("the link is closed")
        return connection

    def _take_kept(self) -> PageConnection | None:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
            if connection is not None:
                self._lent.add(connection)
            return connection

    def _open(self, deadline: float) -> PageConnection:
        """Raises `CannotConnect`, and `TimeoutError` if `deadline` comes first."""
        left_s = page_wire.time_left(deadline)
        try:
            return PageConnection(self._connect(min(deadline, time.monotonic() + CONNECT_S)))
        except (OSError, UnicodeError) as error:  # UnicodeError: of a host that is no name
            if isinstance(error, TimeoutError) and left_s < CONNECT_S:
                raise
            host, port = self._address
            why = str(error) or "no answer in time"
            raise CannotConnect(f"no page connection to {host}:{port}: {why}") from error

    def _connect(self, until: float) -> socket.socket:
        """Tries each address of the host for an equal share of the time. Raises `OSError` or `UnicodeError`."""
        failure: OSError | None = None
        addresses = self._host.addresses(page_wire.time_left(until))
        for number, (family, address) in enumerate(addresses):
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.settimeout(page_wire.time_left(until) / (len(addresses) - number))
                connection.connect(address)
                page_wire.prepare(connection)
                return connection
            except OSError as error:
                connection.close()
                failure = error
        raise failure or OSError("the host has no address")

    def _give_back(self, connection: PageConnection, *, intact: bool) -> None:
        with self._lock:
            self._lent.discard(connection)
            keep = intact and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()


def page_address(grpc_address: str, metadata: bytes) -> tuple[str, int] | None:
    """Where a source takes page connections, from its gRPC address and its metadata; None: nowhere.

    Raises `LinkBroken` for metadata that is no address.
    """
    if not metadata:
        return None
    host, _, port = metadata.decode("ascii", errors="replace").rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:9]) < 1 << 16):
        raise LinkBroken(f"{metadata[:64]!r} is no address of page connections")
    return (host or grpc_address.rpartition(":")[0]).strip("[]"), int(port)
