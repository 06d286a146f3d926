"""The state store of Redis without a server: its records, codecs and Lua scripts over `LuaRedis`.

Several stores may share one `LuaRedis`, as routers share a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

from baton.store.notifier import wait_for_event
from baton.store.options import StoreOptions
from baton.store.redis.client import RedisClient
from baton.store.redis.redis_store import RedisStore
from baton.store.redis.script_files import script_source
from baton.store.redis.subscription import ChannelSubscription
from baton.store.store import StoreUnavailable
from simulation.runtime.lua_redis import LuaRedis, Reply


class LuaStore(RedisStore):
    """A `RedisStore` on a server in this process. Options of connections and deadlines have no effect."""

    def __init__(
        self,
        options: StoreOptions | None = None,
        *,
        clock: Callable[[], float] = time.time,
        server: LuaRedis | None = None,
    ) -> None:
        """Without `server`, a new one on `clock`."""
        self.server = server or LuaRedis(clock)
        super().__init__("", options)

    def _make_client(self, url: str, max_connections: int, *, binary: bool = False) -> RedisClient:
        return cast(RedisClient, _LuaClient(self.server, binary=binary))

    def _make_subscription(self, url: str) -> ChannelSubscription:
        return cast(ChannelSubscription, _LuaSubscription(self.server, self._keys.changes, self._notifier.notify))


class _LuaClient:
    """Stands for a `RedisClient`, and for the connection that it holds."""

    def __init__(self, server: LuaRedis, *, binary: bool) -> None:
        self.redis = self
        self.closed = False
        self._server = server
        self._binary = binary
        self._closing = asyncio.Event()

    def script(self, name: str) -> Callable[..., Awaitable[Reply]]:
        text = script_source(name)

        async def run(keys: Sequence[object], args: Sequence[object]) -> Reply:
            return self._decoded(self._server.run(text, list(keys), list(args)))

        return run

    script_connection = script

    @contextlib.asynccontextmanager
    async def operation(self, action: str, wait_s: float = 0.0) -> AsyncIterator[None]:
        self._check_open()
        yield
        self._check_open()

    async def close(self) -> None:
        self.closed = True
        self._closing.set()

    async def hgetall(self, key: str) -> dict[Any, Any]:
        flat = self._decoded(self._server.execute("HGETALL", key))
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def delete(self, key: str) -> None:
        self._server.execute("DEL", key)

    async def xread(self, after: dict[str, str], block: int | None) -> list[Any]:
        ((key, place),) = after.items()
        grown = asyncio.Event()

        def on_append(name: bytes) -> None:
            if name == key.encode():
                grown.set()

        self._server.on_append.append(on_append)
        try:
            if block and not self._server.execute("XREAD", key, place):
                await wait_for_event(grown, block / 1000)
        finally:
            self._server.on_append.remove(on_append)
        entries = self._server.execute("XREAD", key, place)
        found = [(id, dict(zip(pairs[::2], pairs[1::2], strict=True))) for id, pairs in entries]
        return [(key, found)] if found else []

    async def ping(self) -> None:
        """Does nothing: the server is in this process."""

    async def info(self, section: str) -> dict[str, Any]:
        """Says nothing, as of a server that keeps no file."""
        return {}

    async def config_get(self, name: str) -> dict[str, str]:
        """Says nothing."""
        return {}

    @contextlib.asynccontextmanager
    async def pipeline(self, transaction: bool) -> AsyncIterator[_LuaCommands]:
        yield _LuaCommands(lambda *words: self._decoded(self._server.execute(*words)))

    def _decoded(self, reply: Reply) -> Reply:
        if isinstance(reply, list):
            return [self._decoded(item) for item in reply]
        return reply.decode() if isinstance(reply, bytes) and not self._binary else reply

    def _check_open(self) -> None:
        if self.closed:
            raise StoreUnavailable("this store has been closed; open another with `connect`")


class _LuaCommands:
    """Commands that are run together."""

    def __init__(self, execute: Callable[..., Reply]) -> None:
        self._execute = execute
        self._commands: list[tuple[str | int, ...]] = []

    def hget(self, key: str, name: str) -> None:
        self._commands.append(("HGET", key, name))

    def zrange(self, key: str, start: int, stop: int) -> None:
        self._commands.append(("ZRANGE", key, start, stop))

    def zremrangebyscore(self, key: str, low: str, high: int) -> None:
        self._commands.append(("ZREMRANGEBYSCORE", key, low, high))

    async def execute(self, raise_on_error: bool = True) -> list[Reply]:
        """Runs them; an error is raised either way, as nobody else writes to this server."""
        return [self._execute(*command) for command in self._commands]


class _LuaSubscription:
    """Stands for a `ChannelSubscription`."""

    def __init__(self, server: LuaRedis, channel: str, on_message: Callable[[], None]) -> None:
        self._server = server
        self._channel = channel.encode()
        self._on_message = on_message

    def start(self) -> None:
        if self._on_publish not in self._server.on_publish:
            self._server.on_publish.append(self._on_publish)

    async def close(self) -> None:
        with contextlib.suppress(ValueError):
            self._server.on_publish.remove(self._on_publish)

    def _on_publish(self, channel: bytes) -> None:
        if channel == self._channel:
            self._on_message()
