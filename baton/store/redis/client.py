"""Pooled connections to one Redis server, with one deadline and one error for every operation.

Owned by `RedisStore`; knows no record.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from baton.store.redis.packing import use_native_packing
from baton.store.redis.script_connection import ScriptConnection
from baton.store.redis.script_files import script_source
from baton.store.store import StoreUnavailable


class RedisClient:
    """Use `redis` inside `operation` only. Connects when first needed, and again after every outage."""

    def __init__(self, url: str, *, max_connections: int, timeout_s: float, binary: bool = False) -> None:
        """`binary`: replies are bytes, not text. Raises `ValueError` for an unknown scheme."""
        self._address = without_password(url)
        self._timeout_s = timeout_s
        pool = BlockingConnectionPool.from_url(
            url, max_connections=max_connections, timeout=None, **connection_options(binary=binary)
        )
        use_native_packing(pool)
        self._pool, self._script_connections = pool, list[ScriptConnection]()
        self.redis: Redis = Redis.from_pool(pool)
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def script(self, name: str) -> AsyncScript:
        """Loads a script by its name; redis-py loads it again after the server has lost it."""
        return self.redis.register_script(script_source(name))

    def script_connection(self, name: str) -> ScriptConnection:
        """Loads a script by its name, to be run on a connection of its own."""
        made = ScriptConnection(self._pool, self.script(name))
        self._script_connections.append(made)
        return made

    @contextlib.asynccontextmanager
    async def operation(self, action: str, wait_s: float = 0.0) -> AsyncIterator[None]:
        """Applies one deadline to the block, including connecting and waiting for a free connection.

        `wait_s` is the time that the server itself was asked to wait. Raises `StoreUnavailable`.
        """
        if self._closed:
            raise StoreUnavailable("this store has been closed; open another with `connect`")
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                yield
        except TimeoutError as error:
            raise self._unavailable(action, f"no answer within {self._timeout_s + wait_s} s") from error
        except (RedisError, OSError) as error:
            raise self._unavailable(action, str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Closes the connections; idempotent."""
        self._closed = True
        for connection in self._script_connections:
            await connection.close()
        await self.redis.aclose()

    def _unavailable(self, action: str, why: str) -> StoreUnavailable:
        if self._closed:
            return StoreUnavailable("this store has been closed; open another with `connect`")
        return StoreUnavailable(
            f"redis at {self._address} cannot {action}: {why}; check that the server runs there and takes connections"
        )


def without_password(url: str) -> str:
    """The URL without its password, for logs and errors."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def connection_options(*, binary: bool = False) -> dict[str, object]:
    """Options of every connection. No retries: a script that ran must not run again."""
    return {
        "decode_responses": not binary,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,  # `operation` has the deadline, which covers connecting
        "socket_connect_timeout": None,
    }


def milliseconds(seconds: float) -> int:
    """Converts seconds to a positive integer of milliseconds."""
    return max(1, round(seconds * 1000))
