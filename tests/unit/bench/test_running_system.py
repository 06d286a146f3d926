"""Servers of an experiment: there when they say so, gone afterwards, and named with their last words when they fail."""

import io
import sys
import urllib.request

import pytest
from rich.console import Console

from bench.peers.compare import running
from bench.peers.servers import Server
from bench.running_system import running_server
from services.cli.plan import free_ports

FAILS = (sys.executable, "-c", "print('no such wheel'); raise SystemExit(3)")


def http_server(port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1")


def test_a_server_answers_inside_and_is_gone_outside():
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with running_server(http_server(port), url, "/"), urllib.request.urlopen(f"{url}/", timeout=30.0) as answer:
        assert answer.status == 200
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/", timeout=30.0)


def test_the_variables_are_the_servers():
    code = "import os; print(os.environ['WHOSE']); raise SystemExit(1)"
    command = (sys.executable, "-c", code)
    with (
        pytest.raises(RuntimeError, match="all mine"),
        running_server(command, "http://127.0.0.1:1", "/", {"WHOSE": "all mine"}),
    ):
        raise AssertionError("it never answered")


def test_a_peer_that_fails_is_left_out_with_its_last_words():
    (port,) = free_ports(1)
    servers = [Server("fine", http_server(port), port, "/"), Server("vllm", FAILS, 1, "/health")]
    with running(servers, Console(file=io.StringIO())) as (started, remarks):
        assert [server.name for server in started] == ["fine"]
    assert [remark.name for remark in remarks] == ["vllm did not start"]
    assert remarks[0].words.endswith("no such wheel")


def test_without_baton_there_is_nothing_to_compare():
    baton = Server("baton", FAILS, 1, "/ready")
    with pytest.raises(RuntimeError, match="no such wheel"), running([baton], Console(file=io.StringIO())):
        raise AssertionError("it never started")
