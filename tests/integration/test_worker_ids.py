"""Worker ids on real processes: a live id is never displaced, and a store that starts late is waited for."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx2
import pytest

from baton.services.cli.processes.local_redis import LocalRedis
from baton.services.cli.processes.ports import free_ports
from tests.cluster import Cluster, eventually, is_ready, plain_client
from tests.redis_server import running_redis

pytestmark = pytest.mark.integration


def test_a_second_process_with_an_id_ends_and_the_first_one_serves_on(tmp_path: Path):
    with Cluster(tmp_path, transport="stream") as cluster:
        first = cluster.processes["decode-0"]
        second = cluster.start("decode", "decode-9", {"worker-id": "decode-0"})
        second.expected_running = False
        assert second.popen.wait(60.0) == 3
        said = second.log.read_text()
        assert f"worker id decode-0 is held by 127.0.0.1:{first.port}. Start with another --worker-id" in said
        assert "model_loaded" not in said, "it looks before it loads"
        assert first.popen.poll() is None
        assert "worker_replaced" not in first.log.read_text()
        assert cluster.complete("A page of memory", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_killed_worker_comes_back_under_its_id(tmp_path: Path):
    with Cluster(tmp_path, transport="stream") as cluster:
        killed = cluster.processes["decode-0"]
        killed.signal(signal.SIGKILL)
        killed.popen.wait(30.0)
        cluster.start("decode", "decode-0")
        eventually(lambda: "decode_serving" in cluster.processes["decode-0"].log.read_text(), 60.0, "it serves")
        assert cluster.wait_answer("A page of memory", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_processes_wait_for_a_store_that_starts_late(tmp_path: Path):
    """Nothing listens at the URL of the store while router and workers start and load."""
    [port] = free_ports(1)
    cluster = Cluster(tmp_path, transport="stream")
    redis_url = f"redis://127.0.0.1:{port}/0"
    cluster.redis = cast(LocalRedis, SimpleNamespace(url=redis_url))
    with contextlib.ExitStack() as stack:
        stack.callback(cluster._stop_all)
        workers = [cluster.start(role, f"{role}-0") for role in ("prefill", "decode")]
        router = cluster.start("router", "router-0")
        eventually(lambda: all("_serving" in one.log.read_text() for one in workers), 60.0, "they serve")
        eventually(lambda: "waiting for the state store" in not_ready(router.url), 30.0, "/ready says why")
        stack.enter_context(running_redis(tcp_port=port))
        eventually(lambda: is_ready(router), 30.0, "all have found the store")
        assert [process.popen.poll() for process in (*workers, router)] == [None] * 3


def not_ready(url: str) -> str:
    """The reason that /ready gives; "" while the router does not listen."""
    try:
        with plain_client(timeout=5.0) as client:
            answer = client.get(f"{url}/ready")
    except httpx2.TransportError:
        return ""
    return answer.text if answer.status_code == 503 else ""
