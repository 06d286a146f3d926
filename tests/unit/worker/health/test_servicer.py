"""Health checks and reflection of a real server: states as they are, callers without a token, memory of strangers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import WorkerStatus
from baton.rpc.auth_interceptor import RejectedCall
from baton.rpc.server import ServerAuth, start_server
from baton.worker.health import servicer
from baton.worker.health.servicer import MAX_WATCHERS, WorkerHealth, add_standard_services
from baton.worker.lifecycle import WorkerLifecycle

DEADLINE_S = 20.0
DECODE = "baton.v1.Decode"
CHECK = "/grpc.health.v1.Health/Check"
Status = health_pb2.HealthCheckResponse


class Worker:
    """A server with nothing but the standard services, and the state that they tell."""

    def __init__(self, trust: ClusterTrust) -> None:
        self.trust = trust
        self.linked = True
        self.lifecycle = WorkerLifecycle(asyncio.Event())
        self.rejected: list[RejectedCall] = []
        self.address = ""

    def register(self, server: grpc.aio.Server) -> None:
        health = WorkerHealth(self.lifecycle, lambda: self.linked)
        add_standard_services(server, health, self.trust, (DECODE,))


@asynccontextmanager
async def serving(trust: ClusterTrust = OPEN_CLUSTER) -> AsyncIterator[tuple[Worker, grpc.aio.Channel]]:
    """The worker, and a channel of a caller that has no secret."""
    worker = Worker(trust)
    server = await start_server(
        "127.0.0.1", 0, worker.register, ServerAuth(Incarnation(7), trust, worker.rejected.append)
    )
    worker.address = f"127.0.0.1:{server.port}"
    try:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            yield worker, channel
    finally:
        await server.stop()


async def check(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)).status


async def first(watch: Any) -> int:
    status = (await watch.read()).status
    watch.cancel()
    return status


async def repeated(ask: Callable[[], Awaitable[int]], wanted: object) -> None:
    """Asks until the answer is `wanted`, a state or the code of a refusal; the server hears of other calls later."""
    answer: object = None
    while answer != wanted:
        try:
            answer = await ask()
        except grpc.aio.AioRpcError as error:
            answer = error.code()
        assert answer in (Status.SERVING, grpc.StatusCode.RESOURCE_EXHAUSTED)


def with_secret() -> ClusterTrust:
    return ClusterTrust(secrets.token_bytes(32))


@pytest.mark.parametrize("secret", [False, True], ids=["open", "secret"])
async def test_a_probe_without_a_token_sees_the_state_as_it_is(secret: bool):
    async with serving(with_secret() if secret else OPEN_CLUSTER) as (worker, channel):
        assert await check(channel) == Status.SERVING
        worker.linked = False
        assert await check(channel) == Status.NOT_SERVING
        worker.linked = True
        assert await check(channel) == Status.SERVING
        worker.lifecycle.status = WorkerStatus.DRAINING
        assert await check(channel) == Status.NOT_SERVING
        stub = health_pb2_grpc.HealthStub(channel)
        listed = await stub.List(health_pb2.HealthListRequest(), timeout=DEADLINE_S)
        assert {name: one.status for name, one in listed.statuses.items()} == {"": Status.NOT_SERVING}
        assert worker.rejected == []


async def test_a_watch_tells_changes_and_ends_with_the_drain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(servicer, "WATCH_INTERVAL_S", 0.01)
    async with serving(with_secret()) as (worker, channel), asyncio.timeout(DEADLINE_S):
        stub = health_pb2_grpc.HealthStub(channel)
        seen = []
        async for event in stub.Watch(health_pb2.HealthCheckRequest(service=DECODE)):
            seen.append(event.status)
            if len(seen) == 1:
                worker.linked = False
            elif len(seen) == 2:
                worker.linked = True
            else:
                worker.lifecycle.status = WorkerStatus.DRAINING
                worker.lifecycle.drained.set()
        assert seen == [Status.SERVING, Status.NOT_SERVING, Status.SERVING, Status.NOT_SERVING]


async def test_watchers_are_bounded_and_those_that_left_make_room():
    async with serving() as (_, channel), asyncio.timeout(DEADLINE_S):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_WATCHERS)]
        for watch in watches:
            assert (await watch.read()).status == Status.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            watch.cancel()
        await repeated(
            lambda: first(stub.Watch(health_pb2.HealthCheckRequest())), Status.SERVING
        )  # once it heard of it


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xff\xff\xff", bytes(15 * 1024 * 1024)], ids=["none", "no_message", "large"]
)
async def test_a_request_is_answered_unread(body: bytes):
    async with serving(with_secret()) as (_, channel):
        reply = await channel.unary_unary(CHECK, bytes, Status.FromString)(body, timeout=DEADLINE_S)
        assert reply.status == Status.SERVING


async def test_a_caller_that_sends_no_request_is_answered():
    async with serving(with_secret()) as (_, channel):
        call: Any = channel.stream_stream(CHECK, bytes, Status.FromString)(timeout=DEADLINE_S)
        assert (await call.read()).status == Status.SERVING
        call.cancel()


async def test_an_open_cluster_reflects_its_services():
    async with serving() as (worker, _):
        names = await asyncio.to_thread(reflected, worker.address)
        assert names == {DECODE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def reflected(address: str) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "Check" in database.FindFileContainingSymbol("grpc.health.v1.Health").service[0].method[0].name
        return set(database.get_services())


async def test_a_cluster_with_a_secret_reflects_nothing():
    async with serving(with_secret()) as (_, channel):
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", bytes, bytes)()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
