"""Sends pages on one page connection; those of host memory without copying them (`vmsplice` and `splice`).

What is on its way then is the pool's memory itself, as with NIXL: a page must not be written before its reader has it.
Pins and leases see to that; a reader whose lease has ended throws away what comes, or finds another digest.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import socket
import time
from collections.abc import Sequence

from baton.transfer.stream import page_wire

PIPE_BYTES = 1024 * 1024
"""What any user may ask of a pipe. A pipe of less than `MIN_PIPE_BYTES` saves nothing."""
MIN_PIPE_BYTES = 256 * 1024
MIN_ITEM_BYTES = 16 * 1024
"""Smaller pages are copied: the system takes about as long for each page of memory that it lends."""
RETRY_S = 0.001
"""Pause between tries while the system refuses a send for which the socket has room."""
_NONBLOCK = 2  # SPLICE_F_NONBLOCK
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EFAULT, errno.ENOMEM})
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032
_libc = ctypes.CDLL(None, use_errno=True)


class _Buffer(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class PageWriter:
    """Owned by a connection's thread, which closes it. The pipe is made when it is first of use."""

    def __init__(self, connection: socket.socket, stall_s: float) -> None:
        """`stall_s`: how long the peer may take nothing."""
        self._stall_s = stall_s
        self._connection = connection
        self._lends = hasattr(_libc, "vmsplice")
        self._pipe: tuple[int, int] | None = None

    def send_copies(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Sends all of `buffers`, at most 1,024, which may change at once. Raises `OSError`.

        Raises `TimeoutError` when the peer takes nothing for too long.
        """
        page_wire.send(self._connection, buffers, self._stall_s)

    def send_pages(self, views: Sequence[memoryview]) -> None:
        """Sends all of `views` of host memory, which stay as they are until the peer has them. Raises as `send_copies`.

        Copies them where the system cannot lend them.
        """
        left = [view for view in views if view]
        if min(map(len, left), default=0) >= MIN_ITEM_BYTES:
            while left and self._has_pipe():
                self._lend(left)
        self.send_copies(left)

    def close(self) -> None:
        """Idempotent."""
        self._lends = False
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def _has_pipe(self) -> bool:
        if self._lends and self._pipe is None:
            try:
                self._pipe = os.pipe()
                fcntl.fcntl(self._pipe[1], _F_SETPIPE_SZ, PIPE_BYTES)
            except OSError:
                pass  # too many descriptors, or pipes of this user
            if self._pipe is None or fcntl.fcntl(self._pipe[1], _F_GETPIPE_SZ) < MIN_PIPE_BYTES:
                self.close()
        return self._lends

    def _lend(self, left: list[memoryview]) -> None:
        """Sends what a pipe holds of `left`, and takes it off. Nothing is in the pipe before or after."""
        assert self._pipe is not None
        items = (_Buffer * len(left))(*[_Buffer(_address(view), len(view)) for view in left])
        num_bytes = _libc.vmsplice(self._pipe[1], items, ctypes.c_size_t(len(left)), ctypes.c_uint(_NONBLOCK))
        if num_bytes <= 0:
            if ctypes.get_errno() not in _UNSUPPORTED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            return self.close()
        self._empty(num_bytes)
        page_wire.drop(left, num_bytes)

    def _empty(self, num_bytes: int) -> None:
        """Sends the `num_bytes` that are in the pipe."""
        assert self._pipe is not None
        self._connection.settimeout(self._stall_s)
        deadline, is_refused = time.monotonic() + self._stall_s, False
        while num_bytes:
            try:
                num_bytes -= os.splice(self._pipe[0], self._connection.fileno(), num_bytes, flags=_NONBLOCK)
                deadline, is_refused = time.monotonic() + self._stall_s, False
            except BlockingIOError:
                self._wait(deadline)
                if is_refused:
                    time.sleep(RETRY_S)
                is_refused = True
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self.send_copies([os.read(self._pipe[0], num_bytes)])
                return self.close()

    def _wait(self, deadline: float) -> None:
        """Waits until the socket has room. Raises `TimeoutError`.

        A system that is short of memory takes nothing even so.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        if not poll.poll(1000 * page_wire.time_left(deadline)):
            raise TimeoutError("the peer takes nothing")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
