"""A router and mock workers, each in a process of its own, for `overhead` and `overload`.

The mock workers of the tests compute nothing, so only the router's work is left. For a bottleneck they have few rows
and a delay before every token.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from baton.domain.worker import LinkRecord, WorkerBudgets, WorkerLoad, WorkerRecord
from baton.rpc.gen import decode_pb2
from baton.services.cli.processes.local_redis import LocalRedis
from baton.services.cli.processes.ports import free_ports
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.store import StateStore
from tests.mock_workers import MockDecode, MockPrefill, MockWorker

MODEL = "bundled"
_START_S = 60.0
_STOP_S = 20.0
_TTL_S = 3600.0
_UNLIMITED_LOAD = WorkerLoad(available_pages=1 << 20, total_pages=1 << 20)
_UNLIMITED_ROWS = 4096
BUSY_S = 0.05


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """Limits of the decode worker: concurrent requests, and seconds of each token."""

    num_rows: int
    token_s: float

    def rate(self, num_tokens: int) -> float:
        """Requests a second with `num_tokens` tokens each; prefill makes the first token."""
        return self.num_rows / ((num_tokens - 1) * self.token_s)


class LimitedDecode(MockDecode):
    """Reserves at most its rows and delays every token."""

    def __init__(self, id: str, capacity: DecodeCapacity) -> None:
        super().__init__(id)
        self._capacity = capacity
        self._num_running = 0

    async def Reserve(  # gRPC's name
        self, message: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveReply:
        if self._num_running >= self._capacity.num_rows:
            return decode_pb2.ReserveReply(busy=decode_pb2.Busy(retry_after_s=BUSY_S))
        return await super().Reserve(message, context)

    async def Generate(  # gRPC's name
        self, message: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        self._num_running += 1
        try:
            async for event in super().Generate(message, context):
                if event.HasField("tokens"):
                    await asyncio.sleep(self._capacity.token_s)
                yield event
        finally:
            self._num_running -= 1


@dataclass(frozen=True, slots=True)
class MockCluster:
    """Registrations of the workers, and URL and process id of the router."""

    prefill: WorkerRecord
    decode: WorkerRecord
    router_url: str
    router_pid: int


@dataclass(frozen=True, slots=True)
class _Workers:
    prefill: WorkerRecord
    decode: WorkerRecord


@contextlib.contextmanager
def running_cluster(capacity: DecodeCapacity | None = None, router_flags: Sequence[str] = ()) -> Iterator[MockCluster]:
    """Runs Redis, a prefill and a decode mock in one process, and a router in another; stops all at the end."""
    with (
        LocalRedis() as redis,
        mock_workers(redis.url, capacity) as workers,
        running_router(redis.url, router_flags) as (url, pid),
    ):
        yield MockCluster(workers.prefill, workers.decode, url, pid)


@contextlib.contextmanager
def mock_workers(redis_url: str, capacity: DecodeCapacity | None) -> Iterator[_Workers]:
    """A prefill and a decode mock in a process of their own, registered at `redis_url`."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_workers_main, args=(theirs, redis_url, capacity), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError("the mock workers did not start")
        yield ours.recv()
    finally:
        ours.close()  # which ends the process
        process.join(_STOP_S)
        process.close()


def _workers_main(pipe: Connection, redis_url: str, capacity: DecodeCapacity | None) -> None:
    asyncio.run(_serve_workers(pipe, redis_url, capacity))


async def _serve_workers(pipe: Connection, redis_url: str, capacity: DecodeCapacity | None) -> None:
    """Serves until the other end of the pipe is closed."""
    store = await connect(redis_url, StoreOptions(worker_ttl_s=_TTL_S))
    prefill = MockPrefill("prefill-0")
    decode = MockDecode("decode-0") if capacity is None else LimitedDecode("decode-0", capacity)
    decode.budgets = WorkerBudgets(rows=_UNLIMITED_ROWS if capacity is None else capacity.num_rows)
    try:
        await asyncio.gather(prefill.start(), decode.start())
        pipe.send(await _announce(store, prefill, decode))
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(pipe.recv)
    finally:
        await asyncio.gather(prefill.stop(), decode.stop())
        await store.close()


async def _announce(store: StateStore, prefill: MockPrefill, decode: MockDecode) -> _Workers:
    link = LinkRecord(prefill.id, prefill.incarnation, "stream", 1e9, 4096)
    workers = _Workers(_record(prefill, ()), _record(decode, (link,)))
    await store.announce(workers.prefill)
    await store.announce(workers.decode)
    return workers


def _record(worker: MockWorker, links: tuple[LinkRecord, ...]) -> WorkerRecord:
    record = replace(worker.record(links), model=MODEL, load=_UNLIMITED_LOAD)
    return replace(record, page_size=16, max_model_len=2048, vocab_size=2048)


@contextlib.contextmanager
def running_router(
    redis_url: str, more_flags: Sequence[str] = (), tree: Path | None = None
) -> Iterator[tuple[str, int]]:
    """Runs the real router from the command line; yields its URL and process id. `tree`: the checkout that it is of."""
    [port] = free_ports(1)
    ports = ["--port", str(port), "--metrics-port", "0"]
    flags = [*ports, "--redis-url", redis_url, "--worker-ttl-s", str(_TTL_S), "--log-level", "warning"]
    command = [sys.executable, "-m", "baton.services.cli.main", "serve", "router", *flags, *more_flags]
    environment = None if tree is None else {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.Popen(command, cwd=tree, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(_STOP_S)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Polls `/ready`. Raises `RuntimeError` if the router has exited, `TimeoutError` after `_START_S`."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/ready", timeout=5.0):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            raise RuntimeError("the router exited")
    raise TimeoutError(f"the router was not ready within {_START_S} s")
