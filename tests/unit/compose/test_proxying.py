"""The step `proxy` measures what is late, and fails when events or hang-ups are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from tests.compose import proxying
from tests.compose.load import Expected
from tests.unit.compose.test_engine import Docker
from tests.unit.compose.test_steps import FakeTest

EXPECTED = [Expected((1, 2), (3, 4))]


@contextmanager
def router(lag_s: float = 0.0, hang_up_s: float = 0.0, gone: bool = True) -> Iterator[FakeTest]:
    """A router whose record says that tokens came `lag_s` before they were sent, and hang-ups `hang_up_s` later."""
    traces: dict[str, Any] = {}

    class Router(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            id = f"cmpl-{len(traces)}"
            self.send_response(200)
            self.send_header("x-baton-request-id", id)
            self.end_headers()
            began_us, sent_us = _now_us(), []
            cut = not self._send(body["max_tokens"], lambda: sent_us.append(_now_us()))
            late_us = round(1e6 * (hang_up_s if cut else lag_s))
            times = {
                f"{which}_token_us": sent_us[at] - began_us - late_us for which, at in (("first", 0), ("last", -1))
            }
            traces[id] = {
                "outcome": "cancelled" if cut and gone else "finished", "client_gone": cut, "arrived_unix_us": began_us,
                "e2e_us": _now_us() - began_us + late_us, "sequences": [times],
            }  # fmt: skip

        def _send(self, num_tokens: int, on_send: Callable[[], None]) -> bool:
            """False if the client has hung up."""
            try:
                for _ in range(num_tokens):
                    on_send()
                    self.wfile.write(b'data: {"choices":[{"token_ids":[7]}]}\n\n')
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                return False
            return True

        def do_GET(self) -> None:
            trace = traces.get(self.path.rsplit("/", 1)[-1])
            data = json.dumps({"trace": trace}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing a request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    test = FakeTest(Docker())
    test.url, test.expected = f"http://127.0.0.1:{server.server_port}", EXPECTED
    try:
        yield test
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _now_us() -> int:
    return round(1e6 * time.time())


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxying, "NUM_STREAMS", 3)
    monkeypatch.setattr(proxying, "NUM_HANG_UPS", 1)
    monkeypatch.setattr(proxying, "MANY_TOKENS", 10_000_000)
    monkeypatch.setattr(proxying, "MAX_MEDIAN_LAG_S", 30.0)  # this machine may be busy
    monkeypatch.setattr(proxying, "MAX_HANG_UP_S", 30.0)


def test_lags_and_hang_ups_are_told():
    with router() as test:
        proxying.proxy(test)
    events, hang_ups = test.notes
    assert events.startswith("events ")
    assert events.endswith("n 6) late")
    assert hang_ups.endswith("n 1)")


@pytest.mark.parametrize(("lag_s", "hang_up_s", "why"), [(60.0, 0.0, "wait in the proxy"), (0.0, 60.0, "seen late")])
def test_late_events_and_late_hang_ups_fail(lag_s: float, hang_up_s: float, why: str):
    with router(lag_s, hang_up_s) as test, pytest.raises(AssertionError, match=why):
        proxying.proxy(test)


def test_a_request_that_its_client_left_must_be_cancelled():
    with router(gone=False) as test, pytest.raises(AssertionError, match="finished"):
        proxying.hang_up_delay(test)


def test_percentiles_are_in_milliseconds():
    assert proxying.percentiles([0.001, 0.002, 0.009]) == "2.0 ms (p99 9.0, max 9.0, n 3)"
