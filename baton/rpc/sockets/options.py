"""Options of connections that are not gRPC's."""

from __future__ import annotations

import contextlib
import socket

_PACED, _UNPACED = b"bbr", b"reno"
"""Congestion control: what begins with the first one sleeps between segments. The second is in every Linux kernel."""
_MAX_NAME_BYTES = 16


def send_at_once(connection: socket.socket) -> None:
    """Has small messages leave when they are written: no byte waits for an acknowledgement or for pacing."""
    with contextlib.suppress(OSError):  # it has ended
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unpace_within_host(connection)


def unpace_within_host(connection: socket.socket) -> None:
    """Takes pacing off what this end sends to its own host. Raises `OSError` if the connection has ended."""
    if connection.getpeername()[0] == connection.getsockname()[0]:
        unpace(connection)


def unpace(connection: socket.socket) -> None:
    """Takes pacing off what this end sends, for a path without a queue to protect. It stays where the system refuses.

    An operator may allow processes without rights one choice only (`tcp_allowed_congestion_control`).
    """
    with contextlib.suppress(OSError):
        chosen = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _MAX_NAME_BYTES)
        if chosen.startswith(_PACED):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
