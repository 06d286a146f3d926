"""Listeners of ports that are not gRPC's."""

from __future__ import annotations

import asyncio
import socket

BACKLOG = 128
PASSES = 3
"""Of the loop, from an accepted socket to its transport, to its protocol, and to the first step of a task for it."""


def listen(host: str, port: int) -> socket.socket:
    """A TCP listener at `host`; on every interface for `::`, IPv4 included, as gRPC has it. `port` 0 takes a free one.

    Raises `OSError`.
    """
    host = host.strip("[]")
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)


async def stop_accepting(server: asyncio.Server) -> None:
    """Closes `server` without losing a connection that it has just accepted. Open connections stay open.

    asyncio makes the transport of an accepted socket one pass of the loop later; if the server was closed meanwhile
    that fails, and the socket stays open until it is collected as garbage: its other end waits for an answer. On return
    the server knows all its connections, and the tasks that serve them have begun: one that is cancelled before its
    first step closes nothing.
    """
    loop = asyncio.get_running_loop()
    try:
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        for _ in range(PASSES):
            await asyncio.sleep(0)
    finally:
        server.close()
    for _ in range(PASSES):  # uvloop accepts by itself until now, and loses none, but tells of it a pass later
        await asyncio.sleep(0)
