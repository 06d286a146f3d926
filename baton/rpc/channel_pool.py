"""Channels to other processes, one an address. Stubs are built on what `channels.get(address, incarnation)` returns.

Owned by one asyncio loop. Knows no message. What peers show each other is in `baton.rpc.channel`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.channel import AuthenticatedChannel, open_channel, with_call_tokens

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

PING_INTERVAL_S = 1.0
PING_TIMEOUT_S = 3.0
"""A peer that lets a ping go unanswered for so long is gone: stopped, cut off, or its machine is."""

# A dead peer is noticed at the latest after interval and timeout; pings go on without calls, so that a link is known
# to be broken before a request needs it. They are answered by gRPC's own threads: a peer whose interpreter is busy is
# not taken for dead. What bounds the wait for an answer is ping_timeout_ms: gRPC 1.85 does not close a connection for
# keepalive_timeout_ms, and waits for a minute by default. min_reconnect_backoff_ms is the least time that an attempt
# to connect gets, not the least time between two. Proxies are for the outside world.
CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(1000 * PING_INTERVAL_S)),
    ("grpc.keepalive_timeout_ms", int(1000 * PING_TIMEOUT_S)),
    ("grpc.http2.ping_timeout_ms", int(1000 * PING_TIMEOUT_S)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


StubChannel = grpc.aio.Channel | AuthenticatedChannel
"""What stubs are built on."""


@dataclass(slots=True)
class _PooledChannel:
    """A channel, and `for_stubs`: the way in which it is used to call the worker's present incarnation."""

    channel: grpc.aio.Channel
    incarnation: Incarnation
    for_stubs: StubChannel


class ChannelPool:
    """Open channels by address. `trust`: what is shown to whom they lead to."""

    def __init__(self, trust: ClusterTrust = OPEN_CLUSTER) -> None:
        self._trust = trust
        self._open: dict[str, _PooledChannel] = {}

    def get(self, address: str, incarnation: Incarnation) -> StubChannel:
        """The channel to the worker of this incarnation at host:port `address`; connects when first used.

        With a cluster secret no other incarnation takes its calls: they end as `WorkerLost`.
        """
        pooled = self._open.get(address)
        if pooled is None or pooled.incarnation != incarnation:
            channel = open_channel(address, self._trust, CLIENT_OPTIONS) if pooled is None else pooled.channel
            pooled = self._open[address] = _PooledChannel(
                channel, incarnation, with_call_tokens(channel, self._trust, incarnation)
            )
        return pooled.for_stubs

    async def forget(self, address: str) -> None:
        """Closes the channel to a peer that is gone, ending its calls; idempotent."""
        pooled = self._open.pop(address, None)
        if pooled is not None:
            await pooled.channel.close()

    async def close(self) -> None:
        """Closes all channels, ending their calls; idempotent."""
        opened, self._open = list(self._open.values()), {}
        await asyncio.gather(*(pooled.channel.close() for pooled in opened))
