"""`baton drain` against a real store and a worker with only a `Drain` call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.gen import worker_pb2_grpc
from baton.rpc.server import ServerAuth, start_server
from baton.services.cli.main import run
from baton.services.cli.processes.ports import free_ports
from baton.services.cli.settings import COMMANDS
from baton.settings.base import known_variables
from baton.store.connect import connect
from baton.worker.event_log import SharedEventLog
from baton.worker.lifecycle import WorkerLifecycle
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.registration import Registration
from baton.worker.server import WorkerServicer
from tests.redis_server import running_redis

ID = WorkerId("decode-0")
INCARNATION = Incarnation(7)
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_redis() as server:
        yield server.url


class OnlyDrains:
    """A worker that finishes one request at every drain report."""

    def __init__(self, redis_url: str, num_requests: int, drain_timeout_s: float) -> None:
        self._redis_url = redis_url
        self._num_left = num_requests
        self._drain_timeout_s = drain_timeout_s
        self._address = ""
        self.exit_code: int | None = None
        self.serving = threading.Event()

    async def live(self) -> None:
        store = await connect(self._redis_url)
        try:
            self.lifecycle = WorkerLifecycle(asyncio.Event())
            registration = Registration(store, self._record, 0.1, self.lifecycle.on_registration_lost)
            servicer = WorkerServicer(
                INCARNATION, self.lifecycle, self._report, RecentAttempts(), SharedEventLog(), cast(Any, None)
            )
            async with self._server(servicer):
                await registration.announce()
                self.serving.set()
                await self.lifecycle.run(
                    registration,
                    num_requests=lambda: self._num_left,
                    drain_timeout_s=self._drain_timeout_s,
                    close=self._nothing,
                )
            self.exit_code = self.lifecycle.exit_code
        finally:
            await store.close()

    @asynccontextmanager
    async def _server(self, servicer: WorkerServicer) -> AsyncIterator[None]:
        def register(server: object) -> None:
            worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)

        server = await start_server("127.0.0.1", 0, register, ServerAuth(INCARNATION))
        self._address = f"127.0.0.1:{server.port}"
        try:
            yield
        finally:
            await server.stop(1.0)

    def _report(self) -> int:
        reported = self._num_left
        if self.lifecycle.draining and self._drain_timeout_s > 1.0:
            self._num_left = max(0, self._num_left - 1)
            self.lifecycle.on_idle()
        return reported

    async def _nothing(self) -> None:
        return

    def _record(self) -> WorkerRecord:
        return replace(record_at(self._address), status=self.lifecycle.status)


def record_at(address: str) -> WorkerRecord:
    return WorkerRecord(ID, WorkerRole.DECODE, INCARNATION, address, "m", "f", 16, 512, 512)


@contextmanager
def living(worker: OnlyDrains) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=lambda: asyncio.run(worker.live()))
    thread.start()
    try:
        assert worker.serving.wait(WAIT_S)
        yield thread
    finally:
        worker.lifecycle.on_crash(RuntimeError("the test is over"))
        thread.join(WAIT_S)
        assert not thread.is_alive()


def drain(redis_url: str, *words: str) -> int:
    return run(["drain", ID, f"--redis-url={redis_url}", *words])


def announce(redis_url: str, record: WorkerRecord) -> None:
    async def once() -> None:
        store = await connect(redis_url)
        assert await store.announce(record)
        await store.close()

    asyncio.run(once())


def test_drain_reports_until_the_worker_has_left(redis_url: str, capsys: pytest.CaptureFixture[str]):
    worker = OnlyDrains(redis_url, num_requests=2, drain_timeout_s=WAIT_S)
    with living(worker) as thread:
        assert drain(redis_url) == 0
        thread.join(WAIT_S)  # it has left the store, and is about to end
    lines = capsys.readouterr().err.splitlines()
    counts = [line.rsplit(" ", 1)[1] for line in lines if "is draining, requests left: " in line]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == "2"
    assert lines[-1] == "decode-0 has left"
    assert worker.exit_code == 0


def test_requests_that_a_worker_gave_up_are_reported(redis_url: str, capsys: pytest.CaptureFixture[str]):
    with living(OnlyDrains(redis_url, num_requests=3, drain_timeout_s=0.5)):
        assert drain(redis_url) == 1
    assert "3 requests had to go elsewhere" in capsys.readouterr().err


def test_drain_gives_up_waiting_at_its_timeout(redis_url: str, capsys: pytest.CaptureFixture[str]):
    worker = OnlyDrains(redis_url, num_requests=10**6, drain_timeout_s=WAIT_S)
    with living(worker):
        assert drain(redis_url, "--wait-s=1.5") == 1
        assert worker.lifecycle.draining
    assert "has not left within 1.5 s; it goes on draining" in capsys.readouterr().err


def test_an_unknown_worker_is_an_error(redis_url: str, capsys: pytest.CaptureFixture[str]):
    assert run(["drain", "decode-7", f"--redis-url={redis_url}"]) == 2
    assert "no worker 'decode-7' is announced" in capsys.readouterr().err


def test_an_unreachable_worker_is_an_error(redis_url: str, capsys: pytest.CaptureFixture[str]):
    [port] = free_ports(1)
    announce(redis_url, record_at(f"127.0.0.1:{port}"))
    assert drain(redis_url) == 2
    assert f"decode-0 cannot be reached at 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_worker_of_another_cluster_is_an_error(redis_url: str, capsys: pytest.CaptureFixture[str]):
    record = record_at("127.0.0.1:1")
    signature = ClusterTrust(secret=b"s" * 32).sign(record)
    announce(redis_url, replace(record, signature=signature))
    assert drain(redis_url) == 2
    assert "is not trusted" in capsys.readouterr().err


def test_an_unreachable_store_is_an_error(capsys: pytest.CaptureFixture[str]):
    [port] = free_ports(1)
    assert drain(f"redis://127.0.0.1:{port}/0") == 2
    assert capsys.readouterr().err.startswith("baton: ")
