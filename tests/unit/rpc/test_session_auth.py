"""`Session.Connect` takes a stream of requests: a caller without a valid token is refused before a byte is read."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.auth_interceptor import SESSION_METHOD, RejectedCall
from baton.rpc.call_token import CALL_TOKEN_METADATA_KEY, OPEN_CLUSTER_KEY, CallTokenFault, CallTokenIssuer
from baton.rpc.gen import session_pb2 as pb
from baton.rpc.server import ServerAuth, start_server
from baton.session.wires.grpc_wire import GrpcDialledConnection, GrpcWire, SessionServicer, add_session_servicer
from baton.session.wires.wire import ConnectionRefused, WireConnection

DEADLINE_S = 10.0
WORKER, SUCCESSOR = Incarnation(11), Incarnation(12)
CLUSTER, STRANGER = ClusterTrust(secrets.token_bytes(32)), ClusterTrust(secrets.token_bytes(32))


class Listener:
    """Answers each message with itself, and records how many came."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.num_messages = 0
        self.rejected: list[RejectedCall] = []
        self.address = ""

    async def serve(self, connection: WireConnection) -> None:
        self.num_connections += 1
        while (message := await connection.receive()) is not None:
            self.num_messages += 1
            await connection.send(message)


@asynccontextmanager
async def listening(trust: ClusterTrust) -> AsyncIterator[Listener]:
    listener = Listener()

    def register(server: grpc.aio.Server) -> None:
        add_session_servicer(SessionServicer(listener.serve), server)

    server = await start_server("127.0.0.1", 0, register, ServerAuth(WORKER, trust, listener.rejected.append))
    listener.address = f"127.0.0.1:{server.port}"
    try:
        yield listener
    finally:
        await server.stop()


async def exchange(listener: Listener, trust: ClusterTrust, incarnation: Incarnation = WORKER) -> pb.SessionMessage:
    """The answer to one message. Raises `ConnectionRefused`."""
    wire = GrpcWire(trust)
    async with asyncio.timeout(DEADLINE_S):
        connection = await wire.connect(listener.address, incarnation)
        try:
            await connection.send(pb.SessionMessage(body=b"hello"))
            answer = await connection.receive()
        finally:
            connection.close()
            await wire.close()
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("caller", "incarnation", "fault"),
    [
        (OPEN_CLUSTER, WORKER, CallTokenFault.MISSING),
        (STRANGER, WORKER, CallTokenFault.FORGED),
        (CLUSTER, SUCCESSOR, CallTokenFault.OTHER_INCARNATION),
    ],
)
async def test_a_stranger_is_refused_before_a_byte_is_read(
    caller: ClusterTrust, incarnation: Incarnation, fault: CallTokenFault
):
    async with listening(CLUSTER) as listener:
        with pytest.raises(ConnectionRefused):
            await exchange(listener, caller, incarnation)
        assert (listener.num_connections, listener.num_messages) == (0, 0)
        assert [(rejected.fault, rejected.method) for rejected in listener.rejected] == [(fault, SESSION_METHOD)]


class RefusedCall:
    """A call whose refusal has come before its first message was written."""

    async def write(self, data: bytes) -> None:
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, none, none, details="forged")


async def test_a_refusal_that_comes_before_the_first_message_is_one():
    connection = GrpcDialledConnection(None, RefusedCall(), set())  # type: ignore[arg-type]
    with pytest.raises(ConnectionRefused, match="forged"):
        await connection.send(pb.SessionMessage(body=b"hello"))


@pytest.mark.parametrize("trust", [OPEN_CLUSTER, CLUSTER], ids=["open", "secret"])
async def test_a_member_of_the_cluster_is_served(trust: ClusterTrust):
    async with listening(trust) as listener:
        for _ in range(2):
            assert (await exchange(listener, trust)).body == b"hello"
        assert (listener.num_connections, listener.num_messages) == (2, 2)
        assert listener.rejected == []


async def test_a_captured_token_is_refused():
    key = CLUSTER.key("call-token") or OPEN_CLUSTER_KEY
    metadata = ((CALL_TOKEN_METADATA_KEY, CallTokenIssuer(key, WORKER).issue(SESSION_METHOD, b"")),)
    async with listening(CLUSTER) as listener, grpc.aio.insecure_channel(listener.address) as plain:
        first: Any = plain.stream_stream(SESSION_METHOD)(metadata=metadata, timeout=DEADLINE_S)
        await first.write(pb.SessionMessage(body=b"hello").SerializeToString())
        assert await first.read()
        again: Any = plain.stream_stream(SESSION_METHOD)(metadata=metadata, timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await again.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert listener.num_connections == 1
        assert [rejected.fault for rejected in listener.rejected] == [CallTokenFault.REPLAYED]
        first.cancel()
