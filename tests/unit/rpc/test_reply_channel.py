"""Replies that cannot be read: on every method the call fails with `link_broken`, over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc import codec
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import common_pb2, decode_pb2, decode_pb2_grpc, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2
from baton.rpc.server import ServerAuth, start_server

DEADLINE_S = 20.0
WORKER = Incarnation(11)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (decode_pb2, encode_pb2, handoff_pb2, prefill_pb2, worker_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
UNREADABLE = [b"\xff\xff\xff\xff", b"\x0a\x05abc"]
"""A tag of no field, and a field cut short."""


class RawHandlers(grpc.GenericRpcHandler):
    """Answers every method with raw bytes."""

    def __init__(self, replies: list[bytes]) -> None:
        self.replies = replies

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            return self.replies[0]

        async def upload(requests: AsyncIterator[bytes], context: Any) -> bytes:
            return self.replies[0]

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            for reply in self.replies:
                yield reply

        if METHODS[str(call.method)].client_streaming:
            return grpc.stream_unary_rpc_method_handler(upload, bytes, bytes)
        if METHODS[str(call.method)].server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, bytes, bytes)
        return grpc.unary_unary_rpc_method_handler(unary, bytes, bytes)


@asynccontextmanager
async def answering(replies: list[bytes], trust: ClusterTrust = OPEN_CLUSTER) -> AsyncIterator[Any]:
    """A channel as stubs get it, to a server that sends `replies`."""
    handlers = (RawHandlers(replies),)
    server = await start_server(
        "127.0.0.1", 0, lambda server: server.add_generic_rpc_handlers(handlers), ServerAuth(WORKER, trust)
    )
    pool = ChannelPool(trust)
    try:
        yield pool.get(f"127.0.0.1:{server.port}", WORKER)
    finally:
        await pool.close()
        await server.stop()


def invoke(channel: Any, method: str) -> Any:
    descriptor = METHODS[method]
    if descriptor.client_streaming:
        upload = channel.stream_unary(method, bytes, GetMessageClass(descriptor.output_type).FromString)
        return upload([b""], timeout=DEADLINE_S)
    start = channel.unary_stream if descriptor.server_streaming else channel.unary_unary
    call = start(method, bytes, GetMessageClass(descriptor.output_type).FromString)
    return call(b"", timeout=DEADLINE_S)


@pytest.mark.parametrize("trust", [OPEN_CLUSTER, ClusterTrust(b"s" * 32)], ids=["open", "secret"])
async def test_an_unreadable_reply_is_a_broken_link_on_every_method(trust: ClusterTrust):
    for body in UNREADABLE:
        async with answering([body], trust) as channel:
            for method, descriptor in METHODS.items():
                call = invoke(channel, method)
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await (call.read() if descriptor.server_streaming else call)
                assert type(codec.error_from_rpc(failed.value)) is LinkBroken


async def test_replies_before_the_unreadable_one_are_delivered():
    good = decode_pb2.GenerateEvent(imported=decode_pb2.Imported())
    replies = [good.SerializeToString(), UNREADABLE[0], good.SerializeToString()]
    async with answering(replies) as channel:
        events = aiter(invoke(channel, "/baton.v1.Decode/Generate"))
        assert await anext(events) == good
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be read"):
            await anext(events)


async def test_a_reply_that_never_came_is_a_broken_link():
    assert isinstance(codec.read(decode_pb2.ReserveReply.FromString, None), codec.Unreadable)


async def test_readable_replies_pass_unchanged():
    busy = decode_pb2.ReserveReply(busy=decode_pb2.Busy(retry_after_s=0.5))
    async with answering([busy.SerializeToString()]) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        assert await stub.Reserve(decode_pb2.ReserveRequest(), timeout=DEADLINE_S) == busy
    good = decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(tokens=[common_pb2.OutputToken(index=1)]))
    async with answering([good.SerializeToString()] * 2) as channel:
        call = invoke(channel, "/baton.v1.Decode/Generate")
        assert [await call.read(), await call.read(), await call.read()] == [good, good, grpc.aio.EOF]
