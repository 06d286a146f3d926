"""A stand-in for a service process: the router's or a decode worker's HTTP, misbehaving on demand.

Run by `test_up.py`: `python tiny_service.py PORT FLAWS`; FLAWS is a comma-separated list of what is wrong with it.
"""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

FLAWS = set(sys.argv[2].split(","))


class Handler(BaseHTTPRequestHandler):
    """`POST` counts as a completion and moves bytes, unless the flaw says otherwise."""

    num_completions = 0

    def do_GET(self) -> None:
        moved = 0 if "moves nothing" in FLAWS else 4096 * Handler.num_completions
        metric = f'# TYPE baton_transfer_bytes_total counter\nbaton_transfer_bytes_total{{link="a>b"}} {moved}\n'
        ready = json.dumps({"status": "ready", "detail": "1 pair; kernels: tiny"})
        bodies = {"/ready": ready, "/v1/models": json.dumps({"data": [{"id": "tiny"}]}), "/metrics": metric}
        self._answer(503 if self.path == "/ready" and "never ready" in FLAWS else 200, bodies[self.path])

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        assert json.loads(self.rfile.read(length))["model"] == "tiny"
        if self.path.endswith("/render"):
            self._answer(400 if "has no template" in FLAWS else 200, "{}")
            return
        if "dies of requests" in FLAWS:
            sys.stderr.write("the request killed me\n")
            os._exit(5)
        Handler.num_completions += 1
        self._answer(500 if "fails requests" in FLAWS else 200, "{}")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """No access log."""


if __name__ == "__main__":
    if "dies at start" in FLAWS:
        sys.exit("no such weights")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    sys.stderr.write("serving\n")
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
