"""A server, a channel to it, and errors on the way."""

import asyncio
import errno
from typing import cast

import grpc
import pytest

from baton.domain.errors import Overloaded, WorkerLost
from baton.domain.ids import AttemptId, Incarnation, RequestId
from baton.rpc import codec
from baton.rpc import server as server_module
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import common_pb2, prefill_pb2_grpc
from baton.rpc.server import RunningServer, ServerAuth, start_server

DEADLINE_S = 20.0
WORKER = Incarnation(7)
ENTRANCE = ServerAuth(WORKER)


class FullServicer(prefill_pb2_grpc.PrefillServicer):
    """Answers aborts of attempt 1 and refuses the others."""

    async def Abort(self, request, context):
        if request.id.attempt > 1:
            await codec.abort(context, Overloaded("full up"))
        return common_pb2.AbortReply()


def register(server: grpc.aio.Server) -> None:
    prefill_pb2_grpc.add_PrefillServicer_to_server(FullServicer(), server)


def request(attempt: int) -> common_pb2.AbortRequest:
    return common_pb2.AbortRequest(id=codec.encode_id(AttemptId(RequestId("r"), attempt)))


async def test_typed_errors_pass_and_a_stopped_server_is_worker_lost():
    server = await start_server("127.0.0.1", 0, register, ENTRANCE)
    channels = ChannelPool()
    try:
        stub = prefill_pb2_grpc.PrefillStub(channels.get(f"127.0.0.1:{server.port}", WORKER))
        assert await stub.Abort(request(1), timeout=DEADLINE_S) == common_pb2.AbortReply()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Abort(request(2), timeout=DEADLINE_S)
        error = codec.error_from_rpc(refused.value)
        assert isinstance(error, Overloaded)
        assert str(error) == "full up"
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await stub.Abort(request(1), timeout=DEADLINE_S)
        assert isinstance(codec.error_from_rpc(lost.value), WorkerLost)
    finally:
        await channels.close()
        await server.stop()


async def test_a_busy_port_is_named_in_the_error():
    first = await start_server("127.0.0.1", 0, register, ENTRANCE)
    try:
        with pytest.raises(OSError, match=f"port {first.port}") as caught:
            await start_server("127.0.0.1", first.port, register, ENTRANCE)
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        await first.stop()


async def test_channels_are_kept_by_address_until_forgotten():
    channels = ChannelPool()
    try:
        first = channels.get("127.0.0.1:1", WORKER)
        assert channels.get("127.0.0.1:1", WORKER) is first
        assert channels.get("127.0.0.1:2", WORKER) is not first
        await channels.forget("127.0.0.1:1", WORKER)
        await channels.forget("127.0.0.1:1", WORKER)
        assert channels.get("127.0.0.1:1", WORKER) is not first
    finally:
        await channels.close()
        await channels.close()


async def test_a_stub_is_built_once_for_each_incarnation():
    channels = ChannelPool()
    try:
        first = channels.stub(prefill_pb2_grpc.PrefillStub, "127.0.0.1:1", WORKER)
        assert channels.stub(prefill_pb2_grpc.PrefillStub, "127.0.0.1:1", WORKER) is first
        successor = channels.stub(prefill_pb2_grpc.PrefillStub, "127.0.0.1:1", Incarnation(WORKER + 1))
        assert successor is not first
        await channels.forget("127.0.0.1:1", WORKER)
        assert channels.stub(prefill_pb2_grpc.PrefillStub, "127.0.0.1:1", Incarnation(WORKER + 1)) is successor
        await channels.forget("127.0.0.1:1", Incarnation(WORKER + 1))
        assert channels.stub(prefill_pb2_grpc.PrefillStub, "127.0.0.1:1", Incarnation(WORKER + 1)) is not successor
    finally:
        await channels.close()


class HungServer:
    """A gRPC server whose stop never returns."""

    async def stop(self, grace_s: float | None) -> None:
        await asyncio.Event().wait()

    async def wait_for_termination(self) -> None:
        await asyncio.Event().wait()


async def test_a_server_that_does_not_stop_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "STOP_MARGIN_S", 0.01)
    server = RunningServer(cast(grpc.aio.Server, HungServer()), 1, lambda port: (cast(grpc.aio.Server, None), 0))
    await asyncio.wait_for(server.stop(0.01), DEADLINE_S)


async def test_stops_of_one_server_do_not_overlap(monkeypatch: pytest.MonkeyPatch):
    """Two stops of gRPC's server at once ended in a segmentation fault, in one of several thousand."""
    running = await start_server("127.0.0.1", 0, register, ENTRANCE)
    stop, num_stopping, most = running.server.stop, 0, 0

    async def counted(grace: float | None) -> None:
        nonlocal num_stopping, most
        num_stopping += 1
        most = max(most, num_stopping)
        await stop(grace)
        num_stopping -= 1

    monkeypatch.setattr(running.server, "stop", counted)
    await asyncio.gather(*(running.stop() for _ in range(3)))
    assert (most, num_stopping) == (1, 0)
