"""`baton up`: one command, a first answer, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue
from typing import IO

import httpx2
import pytest

from baton.services.cli.processes.ports import free_ports
from tests.cluster import START_TIMEOUT_S, eventually

pytestmark = pytest.mark.integration


def read_lines(stream: IO[str], printed: Queue[str]) -> None:
    for line in stream:
        printed.put(line)
    printed.put("")
    stream.close()


def lines_until(stream: IO[str], last: str, timeout_s: float) -> list[str]:
    """Output up to a line that begins with `last`."""
    printed: Queue[str] = Queue()
    threading.Thread(target=read_lines, args=(stream, printed), daemon=True).start()
    lines: list[str] = []
    while not lines or not lines[-1].startswith(last):
        try:
            line = printed.get(timeout=timeout_s)
        except Empty:
            line = ""
        if not line:
            raise AssertionError(f"no line begins with {last!r}: {lines}")
        lines.append(line.rstrip())
    return lines


def started(port: int, temporary: Path, errors: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """`baton up`, and what it prints until it serves. Started again where another test has taken a planned port."""
    command = [sys.executable, "-m", "baton.services.cli.entry", "up", f"--port={port}", "--kv-memory-mib=64"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    for _ in range(5):
        with errors.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        assert process.stdout is not None
        try:
            return process, lines_until(process.stdout, "Ctrl-C", START_TIMEOUT_S)
        except AssertionError:
            try:
                process.wait(30.0)  # it ends its children
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10.0)
            if "in use by another process" not in errors.read_text():
                raise
    raise AssertionError("five times a port was taken between its choice and its use")


def children_of(pid: int) -> list[int]:
    """Living children of a process."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_up_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    [port] = free_ports(1)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process, lines = started(port, temporary, tmp_path / "stderr")
    try:
        [curl] = [line for line in lines if line.startswith("curl")]
        url = re.search(r"http://\S+/v1/chat/completions", curl)
        body = re.search(r"-d '(.*)'", curl)
        assert url is not None
        assert body is not None
        response = httpx2.post(
            url[0], content=body[1], headers={"content-type": "application/json"}, timeout=60.0, trust_env=False
        )
        assert response.status_code == 200
        assert response.text.rstrip().endswith("data: [DONE]")
        assert response.headers["x-baton-durable-scope"] == "restart", "its own Redis has an append-only file"
        endpoints = [line.split()[1] for line in lines if line.startswith("metrics")]
        assert len(endpoints) == 3
        for endpoint in endpoints:
            assert "baton_build_info" in httpx2.get(endpoint, timeout=10.0, trust_env=False).text
        family = children_of(process.pid)
        assert len(family) >= 4, "Redis, prefill, decode, router"
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 0
    finally:
        process.kill()
        process.wait(10.0)
    eventually(lambda: not any(map(exists, family)), 5.0, "every child has gone")
    left = [path.name for path in temporary.iterdir() if path.name.startswith("baton")]
    assert left == [], "no socket, no folder (torch keeps a cache of its own there)"
