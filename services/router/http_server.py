"""HTTP servers of a router: uvicorn, run and stopped by `app.run`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from baton.rpc.sockets.listen import stop_accepting
from baton.services.router.edge.http_protocol import BoundedHttpProtocol


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers, and a stop that loses no connection."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Sets none."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops. uvicorn alone would not know of a connection that was accepted a moment before."""
        try:
            for server in self.servers:
                await stop_accepting(server)
        finally:
            await super().shutdown(sockets)


def make_http_server(app: ASGIApp, grace_s: int) -> HttpServer:
    """A server of `app`, for listening sockets that `serve` gets. Open responses have `grace_s` seconds at its stop."""
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody reads a client's address
        timeout_graceful_shutdown=grace_s,
    )
    return HttpServer(config)
