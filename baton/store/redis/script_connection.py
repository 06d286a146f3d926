"""Runs one Lua script on a connection of its own. Made by `RedisClient`, for the script that a router runs most.

redis-py's `AsyncScript` passes a pool, a retry policy and telemetry on every run, about 100 Python calls. Here a run is
a packed command that is written, and its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from hiredis import pack_command
from redis.asyncio import Connection, ConnectionPool
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisError


class ScriptConnection:
    """Runs go one after another. Use it inside `RedisClient.operation` only. Connects again after every failure."""

    def __init__(self, pool: ConnectionPool, script: AsyncScript) -> None:
        """`pool`: makes the connection, which is never part of it."""
        self._connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
        self._script = script
        self._free = asyncio.Lock()

    async def __call__(self, keys: Sequence[str], args: Iterable[str | int | bytes]) -> Any:
        """The reply. Raises `RedisError` and `OSError`; the connection is closed then, unless the reply is an error."""
        operands = (len(keys), *keys, *args)
        async with self._free:
            await self._close_if_stale()
            try:
                return await self._send("EVALSHA", self._script.sha, *operands)
            except NoScriptError:  # a server that has restarted, or another one
                return await self._send("EVAL", self._script.script, *operands)

    async def close(self) -> None:
        """Closes the connection; idempotent."""
        await self._connection.disconnect()

    async def _close_if_stale(self) -> None:
        """The server may have closed it since, and nothing may be left to read on it."""
        connection = self._connection
        if not connection.is_connected:
            return
        try:
            stale = await connection.can_read()
        except RedisError:
            stale = True
        if stale:
            await connection.disconnect()

    async def _send(self, *command: Any) -> Any:
        await self._connection.send_packed_command([pack_command(command)])  # connects if need be
        return await self._connection.read_response()
