"""Requests of strangers cost a worker no memory: the caller is checked before the request is read."""

from __future__ import annotations

import asyncio
import secrets
import threading
from pathlib import Path
from typing import Any

import grpc

from tests.cluster import Cluster, eventually

NUM_CALLS = 60
NUM_BYTES = 15 * 1024 * 1024
MAX_GROWTH_BYTES = 150 * 1024 * 1024
DEADLINE_S = 60.0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


class PeakMemory:
    """Samples the resident memory of a process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self.first = self.peak = resident_bytes(pid)
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, resident_bytes(self._pid))

    def growth(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak - self.first


async def flood(address: str, num_calls: int, method: str = "/baton.v1.Prefill/Prefill") -> list[grpc.StatusCode]:
    """Calls with large requests and no call token, all at once."""
    body = b"\x0a" + bytes(NUM_BYTES)

    async def call(channel: Any) -> grpc.StatusCode:
        try:
            async for _ in channel.unary_stream(method)(body, timeout=DEADLINE_S):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async with grpc.aio.insecure_channel(address) as channel:
        return await asyncio.gather(*(call(channel) for _ in range(num_calls)))


def test_large_requests_without_a_token_cost_no_memory(tmp_path: Path) -> None:
    secret = tmp_path / "cluster.secret"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    with Cluster(tmp_path, flags={"cluster-secret-file": secret}, router_flags={"cluster-secret-file": secret}) as up:
        prefill = up.processes["prefill-0"]
        up.complete("The conductor hands over the baton", max_tokens=4)
        memory = PeakMemory(prefill.popen.pid)
        checks = asyncio.run(flood(f"127.0.0.1:{prefill.port}", NUM_CALLS, "/grpc.health.v1.Health/Check"))
        statuses = asyncio.run(flood(f"127.0.0.1:{prefill.port}", NUM_CALLS))
        growth = memory.growth()
        assert set(checks) == {grpc.StatusCode.OK}
        assert set(statuses) == {grpc.StatusCode.UNAUTHENTICATED}
        assert growth < MAX_GROWTH_BYTES
        eventually(lambda: up.metric("prefill-0", "baton_rejected_calls_total") == NUM_CALLS, 10.0, "all are counted")
        up.complete("The conductor hands over the baton", max_tokens=4)
