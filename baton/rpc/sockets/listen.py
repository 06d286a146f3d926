"""Listeners of ports that are not gRPC's."""

from __future__ import annotations

import socket

BACKLOG = 128


def listen(host: str, port: int) -> socket.socket:
    """A TCP listener at `host`; on every interface for `::`, IPv4 included, as gRPC has it. `port` 0 takes a free one.

    Raises `OSError`.
    """
    host = host.strip("[]")
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
