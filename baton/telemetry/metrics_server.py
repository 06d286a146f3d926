"""Serves `/metrics` of a process without an HTTP server of its own, from a thread."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from baton.telemetry.metrics import REGISTRY

STOP_POLL_S = 0.05
"""Longest time until the thread notices `close`. Python's default, 0.5 s, was most of the time that a worker needs to
stop."""


class _QuietHandler(WSGIRequestHandler):
    """Logs no request."""

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing."""


class _IPv4Server(ThreadingWSGIServer):
    """IPv4."""


class _IPv6Server(ThreadingWSGIServer):
    """IPv6."""

    address_family = socket.AF_INET6


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running endpoint; `port` is the bound one."""

    port: int
    _server: WSGIServer
    _thread: Thread

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def start_metrics_server(host: str, port: int) -> MetricsServer:
    """Serves /metrics; port 0 takes a free one. Raises `OSError` with the port if it is busy."""
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server_class = _IPv6Server if family is socket.AF_INET6 else _IPv4Server
    try:
        server = make_server(host, port, make_wsgi_app(REGISTRY), server_class, _QuietHandler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(errno.EADDRINUSE, f"metrics port {port} on {host} is in use by another process") from None
    thread = Thread(target=server.serve_forever, args=(STOP_POLL_S,), name="metrics", daemon=True)
    thread.start()
    return MetricsServer(server.server_port, server, thread)
