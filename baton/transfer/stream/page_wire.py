"""Messages of page connections, and blocking reads and writes of a socket with a deadline.

A caller sends `MAGIC`, a call token and a serialised `ReadPagesRequest`, whose length the token names. The source
answers with a head and the bytes of the pages, whole and in order. Then the connection takes the next request. A head
with `REFUSED` is followed by the reason, and the end of the connection.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from baton.rpc.sockets.options import unpace_within_host

MAGIC = b"BATONPG1"
METHOD = "page connection/ReadPages"
"""What call tokens are issued for: a token of the gRPC call of the same name is no token here, nor the other way."""
PAGES, REFUSED = 0, 1
HEAD = struct.Struct(">BQ")
"""Of an answer: its kind, and how many bytes follow."""
MAX_REASON_BYTES = 1024
PART_BYTES = 1024 * 1024
"""Most page bytes that are handled at once, or one page if that is more."""
MAX_PART_PAGES = 512
"""Of small pages; the operating system takes 1,024 buffers at once."""
WAKE_BYTES = 512 * 1024
"""A reader of more than that sleeps until so much has come: each wake-up costs about what copying 64 KB does."""
MIN_WAKE_BYTES = 16 * 1024
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""In seconds: a peer whose host has vanished is noticed after 25 s."""


class ConnectionEnded(OSError):
    """The peer has closed the connection, `num_bytes` into a message."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"the connection ended after {num_bytes} bytes of a message")
        self.num_bytes = num_bytes


def part_pages(page_bytes: int) -> int:
    """How many pages are handled at once."""
    return min(MAX_PART_PAGES, max(1, PART_BYTES // page_bytes))


def receive_into(connection: socket.socket, targets: Sequence[memoryview], deadline: float) -> None:
    """Fills `targets`, at most 1,024, until `deadline` (`time.monotonic`).

    Raises `ConnectionEnded`, `TimeoutError` or `OSError`.
    """
    left, num_bytes = list(targets), 0
    missing, wake_at = sum(map(len, left)), 1
    while left:
        connection.settimeout(time_left(deadline))
        wake_at = _wake_at(connection, min(missing - num_bytes, WAKE_BYTES), wake_at)
        received = connection.recvmsg_into(left)[0]
        if not received:
            raise ConnectionEnded(num_bytes)
        num_bytes += received
        drop(left, received)
    _wake_at(connection, 1, wake_at)


def _wake_at(connection: socket.socket, num_bytes: int, before: int) -> int:
    """Has readers sleep until `num_bytes` have come, if that is worth a call. It holds for every later read."""
    wanted = num_bytes if num_bytes > MIN_WAKE_BYTES else 1
    if wanted != before:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
    return wanted


def receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """As `receive_into`."""
    found = bytearray(num_bytes)
    if num_bytes:
        receive_into(connection, [memoryview(found)], deadline)
    return bytes(found)


def prepare(connection: socket.socket) -> None:
    """Sets the options of a new connection: small messages leave at once, an idle one is probed.

    Between two ends on one host bytes are not paced, as BBR does where it is the system's choice.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    unpace_within_host(connection)


def is_quiet(connection: socket.socket) -> bool:
    """True if nothing has come on an idle connection: neither its end nor an error, nor bytes that nobody asked for."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def send(connection: socket.socket, buffers: Sequence[memoryview | bytes], stall_s: float) -> None:
    """Sends all of `buffers`, at most 1,024, without joining them. Raises `OSError`.

    Raises `TimeoutError` when the peer takes nothing for `stall_s`.
    """
    left = [memoryview(buffer) for buffer in buffers if buffer]
    connection.settimeout(stall_s)
    while left:
        drop(left, connection.sendmsg(left))


def drop(buffers: list[memoryview], num_bytes: int) -> None:
    """Takes the first `num_bytes` off `buffers`."""
    num_whole = 0
    while num_whole < len(buffers) and num_bytes >= len(buffers[num_whole]):
        num_bytes -= len(buffers[num_whole])
        num_whole += 1
    del buffers[:num_whole]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]


def time_left(deadline: float) -> float:
    """Seconds until `deadline`. Raises `TimeoutError` after it: a socket takes 0 for another mode."""
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeoutError("past its deadline")
    return left
