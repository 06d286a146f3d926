"""`baton up`: one command, a first answer, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx2
import pytest

from baton.services.cli.errors import EXIT_INTERRUPTED
from tests.cluster import START_TIMEOUT_S, eventually
from tests.integration.operations.up_process import exists, running_up

pytestmark = pytest.mark.integration


def test_up_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with running_up(tmp_path) as up:
        [curl] = [line for line in up.lines if line.startswith("curl")]
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
        endpoints = [line.split()[1] for line in up.lines if line.startswith("metrics")]
        assert len(endpoints) == 3
        for endpoint in endpoints:
            assert "baton_build_info" in httpx2.get(endpoint, timeout=10.0, trust_env=False).text
        assert len(up.children()) >= 4, "Redis, prefill, decode, router"
        assert up.end(signal.SIGINT) == 0


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    """A worker stands still and would be waited for; the router, which is stopped before it, has ended."""
    with running_up(tmp_path, f"--drain-timeout-s={10 * START_TIMEOUT_S:.0f}") as up:
        worker = up.child(" serve decode ")
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        up.popen.send_signal(signal.SIGTERM)
        eventually(lambda: up.child(" serve router ") is None, START_TIMEOUT_S, "the router has ended")
        assert exists(worker)
        assert up.end(signal.SIGTERM) == EXIT_INTERRUPTED
