"""Passes requests on to the router, and keeps one body of each shape that a client sends.

The path begins with the client's name, which is taken off. Texts of others (questions, descriptions) are replaced in
what is kept: `tests/contract/clients/test_shapes.py` replays the shapes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 120.0
REPLACED = {"content", "text", "description", "title", "prompt"}
"""Keys whose texts are the client's or its tests'; their lengths and words decide nothing."""

TELLING = {"role", "type", "tool_choice", "effort"}
"""Keys whose texts are part of a shape."""
HOP_HEADERS = {"connection", "transfer-encoding", "keep-alive", "host", "content-length"}


class ShapeRecorder:
    """Bodies by client and shape. Methods may be called by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, dict[str, dict[str, Any]]] = {}

    def add(self, client: str, path: str, body: Any) -> None:
        """Keeps the first body of its shape."""
        with self._lock:
            kept = self._kept.setdefault(client, {})
            kept.setdefault(json.dumps([path, shape_of(body)]), {"path": path, "body": without_texts(body)})

    def write(self, directory: Path) -> None:
        """A file for each client that sent something."""
        for client, kept in self._kept.items():
            lines = [json.dumps(each, ensure_ascii=False, sort_keys=True) for each in kept.values()]
            (directory / f"{client}.jsonl").write_text("\n".join(sorted(lines)) + "\n")


def shape_of(value: Any, key: str = "") -> Any:
    """The value with types in place of most texts and numbers; of a list, each shape once."""
    if isinstance(value, dict):
        return {name: shape_of(part, name) for name, part in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(shape_of(part)) for part in value})
    return value if isinstance(value, bool) or (isinstance(value, str) and key in TELLING) else type(value).__name__


def without_texts(value: Any, key: str = "") -> Any:
    """The value with a word in place of each text of `REPLACED`."""
    if isinstance(value, dict):
        return {name: without_texts(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [without_texts(part, key) for part in value]
    return "word" if isinstance(value, str) and key in REPLACED else value


def _handler(target: str, recorder: ShapeRecorder) -> type[BaseHTTPRequestHandler]:
    address = urlsplit(target)

    class Handler(BaseHTTPRequestHandler):
        """One request: recorded, passed on, and its answer as it comes."""

        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers.get("content-length", 0))))

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: pytest shows what matters."""

        def _pass_on(self, body: bytes | None) -> None:
            client, _, rest = self.path.lstrip("/").partition("/")
            if body is not None:
                with contextlib.suppress(ValueError):
                    recorder.add(client, f"/{rest}", json.loads(body))
            upstream = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
            with contextlib.closing(upstream):
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
                upstream.request(self.command, f"/{rest}", body, headers)
                answer = upstream.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_HEADERS:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                while data := answer.read1(65536):
                    self.wfile.write(data)

    return Handler


@contextlib.contextmanager
def recording(target: str, recorder: ShapeRecorder) -> Iterator[str]:
    """The address of a proxy before `target`, while it runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(target, recorder)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(TIMEOUT_S)
