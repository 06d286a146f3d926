"""A connection for tests of what goes over one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection over the loopback interface: the end that accepted it, and its peer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
        server.accept()[0] as ours,
    ):
        yield ours, peer
