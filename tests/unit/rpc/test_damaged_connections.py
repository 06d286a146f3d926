"""A connection whose calls fail in ways that no worker means is replaced; calls under way on it go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import grpc
import pytest

from baton.domain.errors import BatonError, LinkBroken, Overloaded, Superseded, WorkerLost
from baton.domain.ids import Incarnation
from baton.rpc import codec
from baton.rpc.channel import may_be_damaged
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import common_pb2, decode_pb2, decode_pb2_grpc
from baton.rpc.server import ServerAuth, start_server
from baton.services.cli.processes.ports import free_ports

DEADLINE_S = 15.0
WORKER = Incarnation(11)
Status = grpc.StatusCode


class DamagedDecode(decode_pb2_grpc.DecodeServicer):
    """Fails every Reserve on its first connection with `failure`; Generate goes on there until `finish`."""

    def __init__(self, failure: BatonError | Status | None) -> None:
        self.failure = failure
        self.peers: list[str] = []
        self.finish = asyncio.Event()

    def note(self, context: Any) -> bool:
        """True for a call on the first connection."""
        if context.peer() not in self.peers:
            self.peers.append(context.peer())
        return bool(context.peer() == self.peers[0])

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveReply:
        if self.note(context) and isinstance(self.failure, BatonError):
            await codec.abort(context, self.failure)
        elif context.peer() == self.peers[0] and self.failure is not None:
            await context.abort(self.failure, "Method not found!")
        return decode_pb2.ReserveReply(busy=decode_pb2.Busy(retry_after_s=0.5))

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[decode_pb2.GenerateEvent]:
        self.note(context)
        yield decode_pb2.GenerateEvent(imported=decode_pb2.Imported())
        await self.finish.wait()
        yield decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(tokens=[common_pb2.OutputToken(index=1)]))


@asynccontextmanager
async def served(failure: BatonError | Status | None) -> AsyncIterator[tuple[DamagedDecode, ChannelPool, str]]:
    servicer, pool = DamagedDecode(failure), ChannelPool()
    add: Any = decode_pb2_grpc.add_DecodeServicer_to_server
    server = await start_server("127.0.0.1", 0, lambda server: add(servicer, server), ServerAuth(WORKER))
    try:
        yield servicer, pool, f"127.0.0.1:{server.port}"
    finally:
        servicer.finish.set()
        await pool.close()
        await server.stop()


async def reserve(pool: ChannelPool, address: str) -> None:
    stub: Any = pool.stub(decode_pb2_grpc.DecodeStub, address, WORKER)
    await stub.Reserve(decode_pb2.ReserveRequest(), timeout=DEADLINE_S)


async def num_connections_of_two_calls(failure: BatonError | Status | None) -> int:
    async with served(failure) as (servicer, pool, address):
        for _ in range(2):
            try:
                await reserve(pool, address)
            except grpc.aio.AioRpcError:
                continue
        return len(servicer.peers)


@pytest.mark.parametrize(
    "status", [Status.UNIMPLEMENTED, Status.INTERNAL, Status.UNKNOWN, Status.UNAUTHENTICATED, Status.DEADLINE_EXCEEDED]
)
async def test_a_status_that_no_worker_means_replaces_the_connection(status: grpc.StatusCode):
    assert await num_connections_of_two_calls(status) == 2


@pytest.mark.parametrize(
    "failure", [None, Overloaded("full"), LinkBroken("no link"), Superseded("newer"), Status.UNAVAILABLE]
)
async def test_the_answers_of_a_worker_keep_the_connection(failure: BatonError | None):
    assert await num_connections_of_two_calls(failure) == 1


@pytest.mark.timeout(60)
async def test_a_call_under_way_survives_the_replacement_of_its_connection():
    async with served(Status.UNIMPLEMENTED) as (servicer, pool, address):
        stub: Any = pool.stub(decode_pb2_grpc.DecodeStub, address, WORKER)
        under_way = stub.Generate(decode_pb2.GenerateRequest(), timeout=DEADLINE_S)
        assert (await under_way.read()).HasField("imported")
        with pytest.raises(grpc.aio.AioRpcError):
            await reserve(pool, address)
        await reserve(pool, address)
        servicer.finish.set()
        assert (await under_way.read()).HasField("tokens")
        assert await under_way.read() is grpc.aio.EOF
        assert len(servicer.peers) == 2


@pytest.mark.timeout(60)
async def test_a_forgotten_peer_loses_its_replaced_connections_too():
    async with served(Status.UNIMPLEMENTED) as (_, pool, address):
        stub: Any = pool.stub(decode_pb2_grpc.DecodeStub, address, WORKER)
        under_way = stub.Generate(decode_pb2.GenerateRequest(), timeout=DEADLINE_S)
        await under_way.read()
        with pytest.raises(grpc.aio.AioRpcError):
            await reserve(pool, address)
        await pool.forget(address, WORKER)
        with pytest.raises(asyncio.CancelledError):
            await under_way.read()


@pytest.mark.timeout(60)
async def test_the_loss_of_a_worker_ends_no_call_of_its_successor():
    """With another worker id at the same address: the old record is found lost long after the successor serves."""
    async with served(None) as (servicer, pool, address):
        before = pool.get(address, Incarnation(7))
        stub: Any = pool.stub(decode_pb2_grpc.DecodeStub, address, WORKER)
        under_way = stub.Generate(decode_pb2.GenerateRequest(), timeout=DEADLINE_S)
        assert (await under_way.read()).HasField("imported")
        await pool.forget(address, Incarnation(7))
        servicer.finish.set()
        assert (await under_way.read()).HasField("tokens")
        assert pool.get(address, Incarnation(7)) is not before


@pytest.mark.timeout(60)
async def test_a_restarted_worker_is_called_without_the_wait_of_its_predecessor():
    """A channel that failed to connect fails its calls until its next attempt, up to a second later."""
    add: Any = decode_pb2_grpc.add_DecodeServicer_to_server
    pool = ChannelPool()
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    try:
        deadline = asyncio.get_running_loop().time() + 1.0  # the wait has grown by then
        while asyncio.get_running_loop().time() < deadline:
            stub: Any = pool.stub(decode_pb2_grpc.DecodeStub, address, Incarnation(7))
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await stub.Reserve(decode_pb2.ReserveRequest(), timeout=DEADLINE_S, wait_for_ready=False)
            await asyncio.sleep(0.01)  # lets gRPC try again
        servicer = DamagedDecode(None)
        server = await start_server("127.0.0.1", port, lambda server: add(servicer, server), ServerAuth(WORKER))
        try:
            await reserve(pool, address)
        finally:
            await server.stop()
    finally:
        await pool.close()


@pytest.mark.timeout(60)
async def test_a_method_name_that_is_no_text_does_not_end_the_server():
    async with served(None) as (servicer, pool, address):
        async with grpc.aio.insecure_channel(address) as channel:
            damaged: Any = channel.unary_unary(b"/baton.v1.Decode/Re\xf2erve")  # type: ignore[arg-type]
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await damaged(b"", timeout=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while len(servicer.peers) == 0:
                with suppress(grpc.aio.AioRpcError):
                    await reserve(pool, address)


def failed(status: grpc.StatusCode, code: str | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if code is None else grpc.aio.Metadata((codec.CODE_METADATA_KEY, code))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, "")


@pytest.mark.parametrize(
    ("error", "out_of_time", "damaged"),
    [
        (failed(Status.DEADLINE_EXCEEDED), True, False),
        (failed(Status.DEADLINE_EXCEEDED), False, True),
        (failed(Status.DEADLINE_EXCEEDED, "deadline_exceeded"), False, False),
        (failed(Status.INTERNAL, "link_broken"), False, True),  # another header's value in the place of the status
        (failed(Status.ABORTED, "gzip"), False, True),
        (failed(Status.ABORTED), False, True),
        (failed(Status.CANCELLED), False, True),
        (failed(Status.OUT_OF_RANGE), False, False),
        (failed(Status.FAILED_PRECONDITION), False, False),
    ],
)
def test_a_worker_s_own_statuses_are_told_from_damage(error: grpc.aio.AioRpcError, out_of_time: bool, damaged: bool):
    assert may_be_damaged(cast("Any", error), out_of_time=out_of_time) is damaged


def test_every_error_of_ours_leaves_the_connection_in_use():
    for error in (WorkerLost(""), LinkBroken(""), Overloaded(""), Superseded("")):
        assert not may_be_damaged(cast("Any", codec.rpc_error(error)), out_of_time=False)
