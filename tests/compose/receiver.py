"""A collector for tests: takes OTLP over HTTP on 4318, and shows on 16686 how many spans of which kind came.

Runs in the router's image, which has the messages of the protocol.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

counts: Counter[str] = Counter()


class Receiver(BaseHTTPRequestHandler):
    """One exporter's or reader's connection."""

    def do_POST(self) -> None:
        """Counts the spans of one batch by service and name."""
        message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in message.resource_spans:
            facts = {each.key: each.value.string_value for each in resource.resource.attributes}
            counts.update(
                f"{facts['service.name']} {span.name}" for part in resource.scope_spans for span in part.spans
            )
        self._answer(b"")

    def do_GET(self) -> None:
        """The counts as JSON."""
        self._answer(json.dumps(counts).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing a request."""


if __name__ == "__main__":
    threading.Thread(target=ThreadingHTTPServer(("", 16686), Receiver).serve_forever, daemon=True).start()
    ThreadingHTTPServer(("", 4318), Receiver).serve_forever()
