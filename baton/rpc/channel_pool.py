"""Channels to other processes, one for each address, and the stubs on them.

A channel whose connection may be damaged, or that was another process's at this address, is replaced: later calls get a
new connection, those under way end on the old one. Owned by one asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import grpc
import structlog

from baton.domain.ids import Incarnation
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.channel import open_channel, with_call_tokens
from baton.rpc.replies.reply_tags import reply_key
from baton.rpc.reply_channel import ReplyChannel

log = structlog.get_logger(__name__)

Stub = TypeVar("Stub")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

PING_INTERVAL_S = 1.0
PING_TIMEOUT_S = 3.0
"""Longest wait for a ping's answer; beyond it the peer counts as stopped or cut off."""

# A dead peer is noticed within interval plus timeout. Pings are sent without calls, too, so a broken link is known
# before a request needs it. gRPC's own threads answer them: a busy interpreter does not look dead. ping_timeout_ms
# bounds the wait: gRPC 1.85 does not close a connection for keepalive_timeout_ms, and waits a minute by default.
# min_reconnect_backoff_ms is the time that an attempt to connect gets, not the time between two. No HTTP proxies.
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


@dataclass(slots=True, eq=False)
class _Connection:
    """A channel, which has one connection of its own. `num_calls`: those under way."""

    channel: grpc.aio.Channel
    num_calls: int = 0


@dataclass(slots=True)
class _PooledChannel:
    """A channel and `for_stubs`, its form for calls to the worker's current incarnation. `stubs` by class."""

    connection: _Connection
    incarnation: Incarnation
    for_stubs: ReplyChannel
    stubs: dict[Callable[[Any], Any], Any] = field(default_factory=dict)


class ChannelPool:
    """Open channels by address. `trust` authenticates this process to its peers."""

    def __init__(self, trust: ClusterTrust = OPEN_CLUSTER) -> None:
        self.trust = trust
        self._open: dict[str, _PooledChannel] = {}
        self._replaced: dict[_Connection, tuple[str, Incarnation]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str, incarnation: Incarnation) -> ReplyChannel:
        """The channel to one worker incarnation at host:port `address`. Connects when first used.

        A restarted worker may keep its address. It gets a channel of its own: that of its predecessor would wait before
        it connects again.

        With a cluster secret, other incarnations reject its calls as `WorkerLost`.
        """
        return self._pooled(address, incarnation).for_stubs

    def stub(self, kind: Callable[[Any], Stub], address: str, incarnation: Incarnation) -> Stub:
        """The stub of class `kind` on that channel, built once: it has callables for every method of its service."""
        pooled = self._pooled(address, incarnation)
        found = pooled.stubs.get(kind)
        if found is None:
            found = pooled.stubs[kind] = kind(pooled.for_stubs)
        return cast("Stub", found)

    def _pooled(self, address: str, incarnation: Incarnation) -> _PooledChannel:
        pooled = self._open.get(address)
        if pooled is not None and pooled.incarnation == incarnation:
            return pooled
        if pooled is not None:
            self._retire(address, pooled)
        connection = _Connection(open_channel(address, self.trust, CLIENT_OPTIONS))
        for_stubs = ReplyChannel(
            with_call_tokens(connection.channel, self.trust, incarnation),
            partial(self._on_open, connection),
            partial(self._replace, address, connection),
            reply_key(self.trust),
        )
        pooled = self._open[address] = _PooledChannel(connection, incarnation, for_stubs)
        return pooled

    async def forget(self, address: str, incarnation: Incarnation) -> None:
        """Closes the channels to a worker that is gone, ending their calls; idempotent. Its successor's stays."""
        connections = [one for one, of in self._replaced.items() if of == (address, incarnation)]
        for connection in connections:
            del self._replaced[connection]
        pooled = self._open.get(address)
        if pooled is not None and pooled.incarnation == incarnation:
            del self._open[address]
            connections.append(pooled.connection)
        await asyncio.gather(*(connection.channel.close() for connection in connections))

    async def close(self) -> None:
        """Closes all channels, ending their calls; idempotent."""
        peers = {(address, pooled.incarnation) for address, pooled in self._open.items()} | {*self._replaced.values()}
        await asyncio.gather(*(self.forget(*peer) for peer in peers))
        await asyncio.gather(*self._closing)

    def _on_open(self, connection: _Connection, call: Any) -> None:
        connection.num_calls += 1
        call.add_done_callback(partial(self._on_done, connection))

    def _on_done(self, connection: _Connection, call: Any) -> None:
        connection.num_calls -= 1
        self._close_if_unused(connection)

    def _replace(self, address: str, connection: _Connection) -> None:
        """Gives later calls a new connection, if they would still get this one."""
        pooled = self._open.get(address)
        if pooled is None or pooled.connection is not connection:
            return
        log.warning("connection_replaced", address=address, why="a call failed with a status that no worker means")
        self._retire(address, pooled)

    def _retire(self, address: str, pooled: _PooledChannel) -> None:
        """Leaves a channel to the calls that are under way on it."""
        del self._open[address]
        self._replaced[pooled.connection] = address, pooled.incarnation
        self._close_if_unused(pooled.connection)

    def _close_if_unused(self, connection: _Connection) -> None:
        if connection.num_calls == 0 and self._replaced.pop(connection, None) is not None:
            closing = asyncio.get_running_loop().create_task(connection.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
