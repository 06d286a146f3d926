"""An HTTP server that answers each connection with the next act of a script, cut wherever the act ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ID = "chatcmpl-1"


@dataclass
class Act:
    """One response: events of (id, data). `complete` False: the connection breaks after them."""

    events: Sequence[tuple[str | None, str]] = ()
    status: int = 200
    body: bytes = b""
    complete: bool = True
    hold: threading.Event | None = None
    """Keeps the stream open until the client is gone; set then."""


@dataclass
class ScriptedRouter:
    """What was asked, as (method, path, last-event-id), and the bodies of questions."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)


class ScriptHandler(BaseHTTPRequestHandler):
    """One connection; a subclass has the script."""

    router: ScriptedRouter
    left: list[Act]
    models: Sequence[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            listed = ", ".join(f'{{"id": "{name}"}}' for name in self.models)
            self._plain(200, f'{{"data": [{listed}]}}'.encode())
        else:
            self._perform("GET")

    def do_POST(self) -> None:
        self.router.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._perform("POST")

    def _perform(self, method: str) -> None:
        self.router.asked.append((method, self.path, self.headers.get("last-event-id")))
        act = self.left.pop(0)
        if act.status != 200:
            self._plain(act.status, act.body)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("x-baton-request-id", ID)
        self.end_headers()
        for id, data in act.events:
            self._chunk((f"id: {id}\n" if id else "") + f"data: {data}\n\n")
        if act.hold is not None:
            self._until_gone(act.hold)
        elif act.complete:
            self._chunk("")
        self.close_connection = True

    def _until_gone(self, gone: threading.Event) -> None:
        self.connection.settimeout(30.0)
        try:
            ended = self.connection.recv(1) == b""
        except ConnectionError:  # a reset: bytes of the answer were unread
            ended = True
        if ended:
            gone.set()

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _plain(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """No access log."""


@contextmanager
def scripted_router(*acts: Act, models: Sequence[str] = ("m",)) -> Iterator[ScriptedRouter]:
    """Serves the acts in order; `/v1/models` is always answered."""
    router = ScriptedRouter()
    handler = type("Handler", (ScriptHandler,), {"router": router, "left": list(acts), "models": models})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        router.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield router
        finally:
            server.shutdown()
            thread.join()
