"""Probes of the machine's current speed, read before and after every block of an experiment.

Each probe takes some tens of milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from pathlib import Path

from baton.kv.memory import PageMemory
from baton.rpc.sockets.options import unpace

PROBE_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_TIMEOUT_S = 30.0


class MemcpyProbe:
    """Copies 64 MB between two mapped, prefaulted regions on huge pages, like page pools."""

    def __init__(self, num_bytes: int = PROBE_BYTES) -> None:
        self._source = PageMemory(1, num_bytes, prefault=True)
        self._target = PageMemory(1, num_bytes, prefault=True)
        self._num_bytes = num_bytes

    def __call__(self) -> float:
        """Bytes a second."""
        began_s = time.perf_counter()
        ctypes.memmove(self._target.address, self._source.address, self._num_bytes)
        return self._num_bytes / (time.perf_counter() - began_s)


class LoopbackProbe:
    """Sends 64 MB through a TCP socket on the loopback interface, in pieces of 1 MB: always the same, in cache.

    Not paced, as page connections within a host: BBR, where it is the system's choice, would slow the baseline.
    """

    def __init__(self, num_bytes: int = PROBE_BYTES) -> None:
        self._num_pieces = max(1, num_bytes // _PIECE_BYTES)

    def __call__(self) -> float:
        """Bytes a second, from the first piece sent to the last received. Raises `OSError`."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = threading.Thread(target=self._send, args=(server.getsockname(),))
            sender.start()
            try:
                server.settimeout(_TIMEOUT_S)
                with server.accept()[0] as receiver:
                    return self._receive(receiver)
            finally:
                sender.join(_TIMEOUT_S)

    def _send(self, address: tuple[str, int]) -> None:
        piece = bytes(_PIECE_BYTES)
        with socket.create_connection(address, timeout=_TIMEOUT_S) as sender:
            unpace(sender)
            for _ in range(self._num_pieces):
                sender.sendall(piece)

    def _receive(self, receiver: socket.socket) -> float:
        receiver.settimeout(_TIMEOUT_S)
        into, num_bytes = memoryview(bytearray(_PIECE_BYTES)), 0
        began_s = time.perf_counter()
        while received := receiver.recv_into(into):
            num_bytes += received
        return num_bytes / (time.perf_counter() - began_s)


def process_rss_bytes(pid: int) -> int:
    """Resident memory of a process. Linux only; raises `OSError`."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def process_tree(pid: int) -> list[int]:
    """A process and all that descend from it. Linux only; processes that end meanwhile are left out."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def tree_pss_bytes(pid: int) -> int:
    """Proportional set size of a process and all its descendants: each shared page counts once. Linux only.

    Raises `OSError` if the process itself cannot be read.
    """
    total = _pss_bytes(pid)
    for each in process_tree(pid)[1:]:
        with contextlib.suppress(OSError):
            total += _pss_bytes(each)
    return total


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all live threads of a process, with nanosecond resolution. Linux only; raises `OSError`."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9
