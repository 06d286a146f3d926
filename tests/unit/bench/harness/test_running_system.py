"""Servers of an experiment answer inside the context and are stopped after it."""

import sys
import urllib.request

import pytest

from baton.services.cli.processes.ports import free_ports
from bench.harness.running_system import running_server


def http_server(port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1")


def test_a_server_answers_inside_the_context_only():
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with running_server(http_server(port), url, "/"), urllib.request.urlopen(f"{url}/", timeout=30.0) as answer:
        assert answer.status == 200
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/", timeout=30.0)


def test_variables_are_set_for_the_server():
    code = "import os; print(os.environ['WHOSE']); raise SystemExit(1)"
    command = (sys.executable, "-c", code)
    with (
        pytest.raises(RuntimeError, match="all mine"),
        running_server(command, "http://127.0.0.1:1", "/", {"WHOSE": "all mine"}),
    ):
        raise AssertionError("it never answered")
