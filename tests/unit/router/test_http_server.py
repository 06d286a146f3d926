"""A stop of the router's HTTP server loses no connection that it has accepted."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from starlette.applications import Starlette

from baton.services.router.app import listen
from baton.services.router.http_server import make_http_server

WAIT_S = 20.0


@pytest.mark.parametrize("num_passes", range(5))
async def test_a_stop_loses_no_connection_on_its_way_in(num_passes: int, monkeypatch: pytest.MonkeyPatch):
    """asyncio accepts a socket in one pass of the loop, and makes and announces its transport in the next two."""
    sock, listening, stop = listen("127.0.0.1", 0), asyncio.Event(), asyncio.Event()
    server = make_http_server(Starlette(), grace_s=1)

    async def main_loop() -> None:  # uvicorn's looks for the stop ten times a second
        listening.set()
        await stop.wait()

    monkeypatch.setattr(server, "main_loop", main_loop)
    address, serving = sock.getsockname(), asyncio.create_task(server.serve([sock]))
    await listening.wait()
    with socket.create_connection(address) as dialler:
        dialler.setblocking(False)
        for _ in range(num_passes):
            await asyncio.sleep(0)
        stop.set()
        async with asyncio.timeout(WAIT_S):
            await serving
            with contextlib.suppress(ConnectionResetError):  # it was not accepted yet
                assert await asyncio.get_running_loop().sock_recv(dialler, 1) == b""
    assert server.server_state.connections == set()
