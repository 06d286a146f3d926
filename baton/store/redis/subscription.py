"""Subscribes to one Redis channel across outages. Owned by `RedisStore`; asyncio only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from baton.store.notifier import wait_for_event


class ChannelSubscription:
    """One task with a connection of its own.

    Calls `on_message` for every message, and after every (re)subscription, since messages may have been missed.
    """

    def __init__(
        self, redis: Redis, channel: str, *, on_message: Callable[[], None], heartbeat_s: float, timeout_s: float
    ) -> None:
        """Owns `redis`. A connection without a reply for two heartbeats, with a ping between them, counts as dead."""
        self._redis = redis
        self._channel = channel
        self._on_message = on_message
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="store-changes")

    async def close(self) -> None:
        """Stops the task and closes the connection; idempotent."""
        self._closing.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=self._timeout_s)
        await self._redis.aclose()

    async def _run(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
                async with self._redis.pubsub() as pubsub:
                    await self._listen(pubsub)
            await wait_for_event(self._closing, self._heartbeat_s)

    async def _listen(self, pubsub: PubSub) -> None:
        """Returns when the connection does not answer a ping; raises when it breaks."""
        async with asyncio.timeout(self._timeout_s):
            await pubsub.subscribe(self._channel)
        pinged = False
        while True:
            message = await pubsub.get_message(timeout=self._heartbeat_s)
            if message is not None:
                pinged = False
                if message["type"] in ("message", "subscribe"):
                    self._on_message()
            elif pinged:
                return
            else:
                async with asyncio.timeout(self._timeout_s):
                    await pubsub.ping()
                pinged = True
