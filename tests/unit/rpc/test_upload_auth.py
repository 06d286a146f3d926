"""Authentication of a stream of requests: the token covers the first one, and nothing is read before it was checked."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.domain.errors import InvalidRequest, LinkBroken
from baton.domain.ids import Incarnation
from baton.domain.media.identity import media_identity
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc import codec
from baton.rpc.auth_interceptor import Malformed, RejectedCall
from baton.rpc.call_token import CALL_TOKEN_METADATA_KEY, CallTokenFault, CallTokenIssuer
from baton.rpc.channel import send_go_ahead
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import prefill_pb2, prefill_pb2_grpc
from baton.rpc.media_upload import MAX_PART_BYTES, media_parts, put_media
from baton.rpc.server import ServerAuth, start_server

DEADLINE_S = 20.0
WORKER, SUCCESSOR = Incarnation(11), Incarnation(12)
CLUSTER, STRANGER = ClusterTrust(secrets.token_bytes(32)), ClusterTrust(secrets.token_bytes(32))
METHOD = "/baton.v1.Prefill/PutMedia"
FILE = bytes(range(256)) * 8192  # two messages
HEADER = prefill_pb2.MediaHeader(identity=media_identity(FILE, "p"), num_bytes=len(FILE), processor="p")


class Uploads(prefill_pb2_grpc.PrefillServicer):
    """Keeps what it was sent; `refuses`: after the header."""

    def __init__(self) -> None:
        self.seen: list[prefill_pb2.PutMediaRequest] = []
        self.refuses = False

    async def PutMedia(self, requests: Any, context: Any) -> prefill_pb2.PutMediaResponse:
        async for request in requests:
            self.seen.append(request)
            if self.refuses:
                raise InvalidRequest("not here")
            if request.HasField("header"):
                await send_go_ahead(context)
        return prefill_pb2.PutMediaResponse(outcome=prefill_pb2.MEDIA_OUTCOME_HELD)


@asynccontextmanager
async def worker(trust: ClusterTrust) -> AsyncIterator[tuple[Uploads, str, list[RejectedCall]]]:
    uploads, rejected = Uploads(), list[RejectedCall]()

    def register(server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(uploads, server)

    server = await start_server("127.0.0.1", 0, register, ServerAuth(WORKER, trust, rejected.append))
    try:
        yield uploads, f"127.0.0.1:{server.port}", rejected
    finally:
        await server.stop()


async def send(trust: ClusterTrust, address: str, incarnation: Incarnation = WORKER) -> prefill_pb2.PutMediaResponse:
    channels = ChannelPool(trust)
    try:
        stub = channels.stub(prefill_pb2_grpc.PrefillStub, address, incarnation)
        return await put_media(stub, HEADER, FILE, DEADLINE_S)
    finally:
        await channels.close()


@pytest.mark.parametrize("trust", [OPEN_CLUSTER, CLUSTER], ids=["open", "secret"])
async def test_a_file_arrives_whole_and_in_order(trust: ClusterTrust):
    async with worker(trust) as (uploads, address, rejected):
        response = await send(trust, address)
        assert response.outcome == prefill_pb2.MEDIA_OUTCOME_HELD
        assert uploads.seen[0].header == HEADER
        assert b"".join(part.data for part in uploads.seen[1:]) == FILE
        assert max(len(part.data) for part in uploads.seen) == MAX_PART_BYTES
        assert rejected == []


async def test_a_stranger_is_refused_before_a_message_is_read():
    async with worker(CLUSTER) as (uploads, address, rejected):
        for trust, incarnation in ((OPEN_CLUSTER, WORKER), (STRANGER, WORKER), (CLUSTER, SUCCESSOR)):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await send(trust, address, incarnation)
            assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert uploads.seen == []
        faults = [CallTokenFault.MISSING, CallTokenFault.FORGED, CallTokenFault.OTHER_INCARNATION]
        assert [one.fault for one in rejected] == faults


async def call_with(address: str, token_of: bytes, bodies: list[bytes]) -> grpc.aio.AioRpcError:
    """Sends `bodies` with a token that covers `token_of`."""
    key = CLUSTER.key("call-token")
    assert key is not None
    metadata = ((CALL_TOKEN_METADATA_KEY, CallTokenIssuer(key, WORKER).issue(METHOD, token_of)),)
    async with grpc.aio.insecure_channel(address) as plain:
        upload: Any = plain.stream_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await upload(iter(bodies), metadata=metadata, timeout=DEADLINE_S)
    return failed.value


async def test_another_header_than_the_tokens_is_a_broken_link():
    first, other = (
        prefill_pb2.PutMediaRequest(header=prefill_pb2.MediaHeader(num_bytes=n)).SerializeToString() for n in (1, 2)
    )
    async with worker(CLUSTER) as (uploads, address, rejected):
        error = await call_with(address, first, [other])
        assert type(codec.error_from_rpc(error)) is LinkBroken
        assert uploads.seen == []
        assert [one.fault for one in rejected] == [Malformed.DAMAGED]


async def test_a_later_message_that_cannot_be_read_is_a_broken_link():
    first = next(media_parts(HEADER, b"")).SerializeToString()
    async with worker(CLUSTER) as (_, address, rejected):
        error = await call_with(address, first, [first, b"\xff\xff\xff\xff"])
        assert type(codec.error_from_rpc(error)) is LinkBroken
        assert [one.fault for one in rejected] == [Malformed.MALFORMED]


async def test_a_servicer_may_refuse_after_the_header():
    async with worker(CLUSTER) as (uploads, address, _):
        uploads.refuses = True
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await send(CLUSTER, address)
        assert type(codec.error_from_rpc(failed.value)) is InvalidRequest
        assert len(uploads.seen) == 1
