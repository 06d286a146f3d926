"""Replies that the called worker has not sent, or not to this call: refused on every method, over real connections."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.domain.errors import LinkBroken
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust, TlsIdentity
from baton.rpc import codec
from baton.rpc.call_token import CallTokenIssuer
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import decode_pb2
from baton.rpc.replies.reply_tags import TAGGED_BYTES, UNTAGGED_METHODS, ReplyTags, reply_key
from baton.rpc.server import ServerAuth, start_server
from tests.mocks.relay import relay
from tests.unit.rpc.test_reply_channel import METHODS, WORKER, RawHandlers, invoke

CLUSTER = ClusterTrust(secrets.token_bytes(32))
KEY = secrets.token_bytes(32)
TAGGED = sorted(
    name for name, method in METHODS.items() if not method.client_streaming and name not in UNTAGGED_METHODS
)
STREAMS = [name for name in TAGGED if METHODS[name].server_streaming]
REPLIES = [b"\xf0\x7f" + bytes([number]) for number in (1, 2, 3)]
"""A field that no message has: readable replies of every method."""

Replies = list[bytes]


@asynccontextmanager
async def forging(change: Callable[[Replies], Replies], trust: ClusterTrust = CLUSTER) -> AsyncIterator[Any]:
    """A channel as stubs get it, to a worker behind a relay that changes replies."""
    handlers = (RawHandlers(REPLIES),)
    server = await start_server(
        "127.0.0.1", 0, lambda server: server.add_generic_rpc_handlers(handlers), ServerAuth(WORKER, trust)
    )
    pool = ChannelPool(trust)
    try:
        streams = lambda method: METHODS[method].server_streaming  # noqa: E731
        async with relay(server.port, streams, lambda _, replies: change(replies)) as port:
            yield pool.get(f"127.0.0.1:{port}", WORKER)
    finally:
        await pool.close()
        await server.stop()


async def received(channel: Any, method: str) -> list[Any]:
    """All replies of a call. Raises `BatonError`."""
    call = invoke(channel, method)
    try:
        return [reply async for reply in call] if METHODS[method].server_streaming else [await call]
    except grpc.aio.AioRpcError as error:
        raise codec.error_from_rpc(error) from None


def changed(replies: Replies) -> Replies:
    return [reply[: -TAGGED_BYTES - 1] + b"\x09" + reply[-TAGGED_BYTES:] for reply in replies]


def untagged(replies: Replies) -> Replies:
    return [reply[:-TAGGED_BYTES] for reply in replies]


def of_a_stranger(replies: Replies) -> Replies:
    token = CallTokenIssuer(KEY, WORKER).issue("/m", b"")
    tags = ReplyTags(KEY, token)
    return [tags.add(reply[:-TAGGED_BYTES]) for reply in replies]


def empty(replies: Replies) -> Replies:
    return [b"" for _ in replies]


@pytest.mark.parametrize("change", [changed, untagged, of_a_stranger, empty])
async def test_a_forged_reply_is_a_broken_link_on_every_method(change: Callable[[Replies], Replies]):
    async with forging(change) as channel:
        for method in TAGGED:
            with pytest.raises(LinkBroken, match="not the called worker's next reply"):
                await received(channel, method)


async def test_replies_of_another_call_are_refused():
    """The same method, the same request, a moment ago."""
    captured: list[Replies] = []

    def replayed(replies: Replies) -> Replies:
        captured.append(replies)
        return captured[0]

    async with forging(replayed) as channel:
        for method in TAGGED:
            captured.clear()
            await received(channel, method)
            with pytest.raises(LinkBroken, match="not the called worker's next reply"):
                await received(channel, method)


@pytest.mark.parametrize(
    ("change", "num_good"),
    [
        (lambda replies: [replies[1], replies[0], replies[2]], 0),
        (lambda replies: replies[1:], 0),
        (lambda replies: [replies[0], replies[2]], 1),
        (lambda replies: [replies[0], replies[0]], 1),
        (lambda replies: [*replies, replies[2]], 3),
    ],
    ids=["swapped", "first lost", "second lost", "repeated", "one too many"],
)
async def test_replies_out_of_order_are_refused(change: Callable[[Replies], Replies], num_good: int):
    async with forging(change) as channel:
        for method in STREAMS:
            events = aiter(invoke(channel, method))
            for _ in range(num_good):
                await anext(events)
            with pytest.raises(grpc.aio.AioRpcError, match="not the called worker's next reply"):
                await anext(events)


async def test_true_replies_pass_and_show_no_tag():
    async with forging(lambda replies: replies) as channel:
        for method in TAGGED:
            replies = await received(channel, method)
            assert [reply.SerializeToString() for reply in replies] == REPLIES[: len(replies)]
        call = invoke(channel, STREAMS[0])
        assert [(await call.read()).SerializeToString() for _ in REPLIES] == REPLIES
        assert await call.read() is grpc.aio.EOF


async def test_the_reply_to_an_upload_has_a_tag():
    upload = next(name for name, method in METHODS.items() if method.client_streaming and "PutMedia" in name)
    handlers = (RawHandlers(REPLIES),)
    server = await start_server(
        "127.0.0.1", 0, lambda server: server.add_generic_rpc_handlers(handlers), ServerAuth(WORKER, CLUSTER)
    )
    pool = ChannelPool(CLUSTER)
    try:
        reply = await invoke(pool.get(f"127.0.0.1:{server.port}", WORKER), upload)
        assert reply.SerializeToString() == REPLIES[0]
    finally:
        await pool.close()
        await server.stop()


async def test_page_bytes_and_open_clusters_have_no_tags():
    seen: list[Replies] = []

    def spied(replies: Replies) -> Replies:
        seen.append(replies)
        return replies

    for trust, methods in ((CLUSTER, sorted(UNTAGGED_METHODS)), (OPEN_CLUSTER, TAGGED)):
        async with forging(spied, trust) as channel:
            for method in methods:
                await received(channel, method)
    assert {reply for replies in seen for reply in replies} == set(REPLIES)


def test_encrypted_calls_need_no_tags():
    tls = TlsIdentity(b"certificate", b"key", b"authorities")
    assert reply_key(CLUSTER) is not None
    assert reply_key(replace(CLUSTER, tls=tls)) is None
    assert reply_key(OPEN_CLUSTER) is None


def test_a_caller_of_an_older_build_reads_tagged_replies():
    """A tag is a field that the message does not have."""
    busy = decode_pb2.ReserveReply(busy=decode_pb2.Busy(retry_after_s=0.5))
    token = CallTokenIssuer(KEY, WORKER).issue("/m", b"")
    tagged = ReplyTags(KEY, token).add(busy.SerializeToString())
    assert decode_pb2.ReserveReply.FromString(tagged).busy == busy.busy


def test_the_token_of_a_call_is_not_enough_to_tag_its_replies():
    """Who sits on the way reads it."""
    token = CallTokenIssuer(KEY, WORKER).issue("/m", b"")
    forged = ReplyTags(secrets.token_bytes(32), token).add(REPLIES[0])
    assert ReplyTags(KEY, token).remove(forged) is None


def test_each_bit_of_a_tagged_reply_counts():
    token = CallTokenIssuer(KEY, WORKER).issue("/m", b"")
    tagged = ReplyTags(KEY, token).add(REPLIES[2])
    assert ReplyTags(KEY, token).remove(tagged) == REPLIES[2]
    for bit in range(8 * len(tagged)):
        flipped = bytearray(tagged)
        flipped[bit // 8] ^= 1 << bit % 8
        assert ReplyTags(KEY, token).remove(bytes(flipped)) is None
    for length in range(len(tagged)):
        assert ReplyTags(KEY, token).remove(tagged[:length]) is None
