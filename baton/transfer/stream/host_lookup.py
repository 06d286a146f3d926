"""Looks up the host of a source within a deadline: the system's resolver has none of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

_Address = tuple[socket.AddressFamily, Any]
_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class HostLookup:
    """The addresses of one host. May be used from any thread.

    A lookup has a thread of its own. All who wait share one, so that a resolver that hangs costs a thread a host.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._running: Future[Sequence[_Address]] | None = None

    def addresses(self, timeout_s: float) -> Sequence[_Address]:
        """Family and address of each, looked up anew. Raises `TimeoutError`, `OSError` or `UnicodeError`."""
        try:
            return self._find(_NUMERIC)
        except (socket.gaierror, UnicodeError):
            return self._start().result(timeout_s)

    def _start(self) -> Future[Sequence[_Address]]:
        """The lookup under way, or a new one. Raises `OSError` when the process has no thread for it."""
        with self._lock:
            if self._running is None or self._running.done():
                running: Future[Sequence[_Address]] = Future()
                try:
                    threading.Thread(target=self._run, args=(running,), name="baton-lookup", daemon=True).start()
                except RuntimeError as error:
                    raise OSError(f"no thread to look up {self._host}: {error}") from error
                self._running = running
            return self._running

    def _run(self, running: Future[Sequence[_Address]]) -> None:
        """The root of a lookup's thread."""
        try:
            running.set_result(self._find(0))
        except Exception as error:
            running.set_exception(error)

    def _find(self, flags: int) -> Sequence[_Address]:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, address) for family, _, _, _, address in found]
