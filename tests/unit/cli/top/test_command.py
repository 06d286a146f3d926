"""`baton top --once` and `--json`, and the readers' errors, against a scripted router."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from baton.services.cli.main import run
from baton.services.cli.settings import COMMANDS
from baton.services.cli.top.snapshot_reader import ClusterUnreadable, SnapshotReader
from baton.settings.base import known_variables
from tests.unit.cli.top.snapshots import ENCODED, SNAPSHOT


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def router(status: int = 200, body: bytes = ENCODED) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/cluster"
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """No access log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_once_prints_words_without_colours(capsys):
    with router() as url:
        assert run(["top", "--once", "--router", url]) == 0
    out = capsys.readouterr().out
    assert "prefill-0 > decode-0 up cma" in out
    assert "\x1b" not in out


def test_json_is_the_routers_own_snapshot(capsys):
    with router() as url:
        assert run(["top", "--json", "--router", f"http://127.0.0.1:1,{url}"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(ENCODED)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"{}", "set BATON_API_KEY"),
        (404, b"no such path", "HTTP 404: no such path"),
        (200, b'{"v": 9}', "another version's form"),
    ],
)
def test_what_is_no_snapshot_is_explained(status, body, words, capsys):
    with router(status, body) as url:
        assert run(["top", "--once", "--router", url]) == 2
    assert words in capsys.readouterr().err


async def test_a_router_that_left_is_replaced_by_the_next():
    with router() as second:
        with router() as first:
            reader = SnapshotReader([first, second], None)
            assert await reader.read() == SNAPSHOT
        assert await reader.read() == SNAPSHOT
    with pytest.raises(ClusterUnreadable, match="does not answer"):
        await reader.read()
    await reader.close()
