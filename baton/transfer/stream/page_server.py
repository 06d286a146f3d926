"""Serves page connections: one blocking thread each, since a send of many pages holds no lock of the interpreter.

Nothing is read from a caller without a valid call token but the token itself. Owned by `StreamSource`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import structlog
from google.protobuf.message import DecodeError

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.kv.memory import PoolMemory
from baton.rpc.auth_interceptor import Fault, Malformed, RejectedCall
from baton.rpc.call_token import OPEN_CLUSTER_KEY, TOKEN_BYTES, CallTokenFault, CallTokenVerifier
from baton.rpc.gen import handoff_pb2
from baton.rpc.request_budget import MAX_CONTROL_BYTES
from baton.rpc.sockets.listen import listen
from baton.transfer.stream import page_wire
from baton.transfer.stream.page_writer import PageWriter

MAX_CONNECTIONS = 512
MAX_STRANGERS = 64
"""Connections without a valid request yet. The oldest of them makes room: a reader sends its request at once."""
FIRST_REQUEST_S = 10.0
"""Time from the opening of a connection to its first whole request."""
REQUEST_S = 10.0
"""Time from the first byte of a later request to its last one."""
STALL_S = 20.0
"""How long a caller may take nothing of its answer."""
CLOSE_S = 2.0
RETRY_S = 0.05
_log = structlog.get_logger(__name__)


class PageServer:
    """Listens from its construction on."""

    def __init__(
        self,
        incarnation: Incarnation,
        memory: PoolMemory,
        trust: ClusterTrust,
        address: tuple[str, int],
        on_rejected: Callable[[RejectedCall], None],
    ) -> None:
        """`on_rejected` is called in any thread. Raises `LinkBroken` if it cannot listen."""
        host, port = address
        self._on_rejected = on_rejected
        self._incarnation = incarnation
        self._memory = memory
        self._verifier = CallTokenVerifier(trust.keys("call-token") or (OPEN_CLUSTER_KEY,), incarnation)
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._open: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._displaced: set[socket.socket] = set()  # their threads are about to end
        self._closed = threading.Event()
        try:
            self._listener = listen(host, port)
        except OSError as error:
            raise LinkBroken(f"cannot listen for page connections at {host}:{port}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="baton-pages", daemon=True)
        self._acceptor.start()

    @property
    def num_connections(self) -> int:
        """Open ones."""
        return len(self._open)

    def close(self) -> None:
        """Closes the port and all connections; idempotent."""
        with self._lock:
            self._closed.set()
            connections = dict(self._open)
        for each in (self._listener, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self._listener.close()
        deadline = time.monotonic() + CLOSE_S
        for thread in (self._acceptor, *connections.values()):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        """The root of the accepting thread."""
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if self._closed.wait(RETRY_S):
                    return
                continue  # there was no free file descriptor
            thread = threading.Thread(
                target=self._serve, args=(connection, f"{peer[0]}:{peer[1]}"), name="baton-pages", daemon=True
            )
            if not self._admit(connection, thread) or not self._started(thread, connection):
                connection.close()

    def _admit(self, connection: socket.socket, thread: threading.Thread) -> bool:
        """Enters a connection, if there is room for it."""
        with self._left:
            self._left.wait_for(lambda: len(self._open) < MAX_CONNECTIONS or not self._displaced, CLOSE_S)
            if self._closed.is_set() or len(self._open) >= MAX_CONNECTIONS:
                return False
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                self._displaced.add(oldest)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
            self._open[connection] = thread
            self._strangers[connection] = None
            return True

    def _leave(self, connection: socket.socket) -> None:
        """Removes and closes a connection. Under the lock, so that nobody shuts down a descriptor of another use."""
        with self._lock:
            self._open.pop(connection, None)
            self._strangers.pop(connection, None)
            self._displaced.discard(connection)
            connection.close()
            self._left.notify()

    def _started(self, thread: threading.Thread, connection: socket.socket) -> bool:
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads
            _log.warning("page_connection_refused", reason=str(error))
            self._leave(connection)
            return False
        return True

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """The root of a connection's thread."""
        try:
            page_wire.prepare(connection)
            deadline = time.monotonic() + FIRST_REQUEST_S
            with contextlib.closing(PageWriter(connection, STALL_S)) as writer:
                while self._answer(connection, writer, peer, deadline):
                    connection.settimeout(None)
                    if not connection.recv(1, socket.MSG_PEEK):
                        return
                    deadline = time.monotonic() + REQUEST_S
        except OSError as error:
            if not self._closed.is_set():
                _log.debug("page_connection_ended", reason=str(error))
        finally:
            self._leave(connection)

    def _answer(self, connection: socket.socket, writer: PageWriter, peer: str, deadline: float) -> bool:
        """Answers one request; False if it was refused."""
        try:
            request = self._read_request(connection, deadline)
        except _Refused as refused:
            if refused.fault is not None:
                self._on_rejected(RejectedCall(refused.fault, page_wire.METHOD, peer))
            reason = str(refused).encode()[: page_wire.MAX_REASON_BYTES]
            writer.send_copies([page_wire.HEAD.pack(page_wire.REFUSED, len(reason)), reason])
            return False
        with self._lock:
            self._strangers.pop(connection, None)
        memory, pages = self._memory, request.pages
        num_bytes = request.leading_bytes or memory.page_bytes
        head = page_wire.HEAD.pack(page_wire.PAGES, len(pages) * num_bytes)
        writer.send_copies([head])
        step = page_wire.part_pages(num_bytes)
        for start in range(0, len(pages), step):
            part = pages[start : start + step]
            views = memory.host_views(part, num_bytes)
            if views is None:
                writer.send_copies(memory.read(part, num_bytes))
            else:
                writer.send_pages(views)
        return True

    def _read_request(self, connection: socket.socket, deadline: float) -> handoff_pb2.ReadPagesRequest:
        """A request, checked. Its body is read once its token's header is accepted. Raises `_Refused`."""
        head = page_wire.receive(connection, len(page_wire.MAGIC) + TOKEN_BYTES, deadline)
        if not head.startswith(page_wire.MAGIC):
            raise _Refused("this is no request for pages", Malformed.MALFORMED)
        with self._lock:
            token = self._verifier.accept(page_wire.METHOD, head[len(page_wire.MAGIC) :])
        if isinstance(token, CallTokenFault):
            raise _Refused(f"the call token is refused: {token.value}", token)
        if token.num_bytes > MAX_CONTROL_BYTES:
            raise _Refused(f"a request has at most {MAX_CONTROL_BYTES} bytes", Malformed.TOO_LARGE)
        body = page_wire.receive(connection, token.num_bytes, deadline)
        if not token.covers(body):
            raise _Refused("the request is not the one that the call token was issued for", Malformed.DAMAGED)
        try:
            request = handoff_pb2.ReadPagesRequest.FromString(body)
        except DecodeError as error:
            raise _Refused("the request cannot be read", Malformed.MALFORMED) from error
        if request.incarnation != self._incarnation:
            raise _Refused("another incarnation of this worker is meant")
        if any(page >= self._memory.num_pages for page in request.pages):
            raise _Refused(f"a page is outside the pool of {self._memory.num_pages}")
        if request.leading_bytes > self._memory.page_bytes:
            raise _Refused(f"a page has {self._memory.page_bytes} bytes, not {request.leading_bytes}")
        return request


class _Refused(Exception):
    """A request is not answered. `fault`: it is counted as a rejected call."""

    def __init__(self, why: str, fault: Fault | None = None) -> None:
        super().__init__(why)
        self.fault = fault
