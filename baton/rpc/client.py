"""Channels to other processes, one an address. Callers build stubs on them: `PrefillStub(channels.get(address))`.

Owned by one asyncio loop. Knows no message.
"""

from __future__ import annotations

import asyncio

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# A dead peer is noticed within about two seconds even when its machine vanished; pings go on without calls, so that
# a link is known to be broken before a request needs it. Proxies are for the outside world.
CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class Channels:
    """Open channels by address."""

    def __init__(self) -> None:
        self._open: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port `address`; connects when first used."""
        channel = self._open.get(address)
        if channel is None:
            channel = self._open[address] = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        return channel

    async def forget(self, address: str) -> None:
        """Closes the channel to a peer that is gone, ending its calls; idempotent."""
        channel = self._open.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all channels, ending their calls; idempotent."""
        channels, self._open = list(self._open.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))
