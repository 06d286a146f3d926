"""The connection of one script: loads it, outlives the server's, and never takes the answer of an earlier run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import ResponseError

from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.redis.client import connection_options
from baton.store.redis.script_connection import ScriptConnection

ECHO = "if ARGV[1] == 'fail' then return redis.error_reply('WRONG') end return {KEYS[1], ARGV[1]}"


@pytest.fixture
async def redis(server: LocalRedis) -> AsyncIterator[Redis]:
    pool = BlockingConnectionPool.from_url(server.url, **connection_options(binary=True))
    redis = Redis.from_pool(pool)
    yield redis
    await redis.aclose()


@pytest.fixture
async def echo(redis: Redis) -> AsyncIterator[ScriptConnection]:
    connection = ScriptConnection(redis.connection_pool, redis.register_script(ECHO))
    yield connection
    await connection.close()


async def test_a_script_that_the_server_lacks_is_loaded(redis: Redis, echo: ScriptConnection) -> None:
    for _ in range(2):
        assert await echo(["k"], [1]) == [b"k", b"1"]
        await redis.script_flush()


async def test_a_connection_that_the_server_closed_is_made_again(redis: Redis, echo: ScriptConnection) -> None:
    assert await echo(["k"], ["a"]) == [b"k", b"a"]
    assert await redis.client_kill_filter(_type="normal", skipme=True) >= 1
    assert await echo(["k"], ["b"]) == [b"k", b"b"]


async def test_the_answer_of_a_cancelled_run_is_not_taken_for_the_next(redis: Redis, echo: ScriptConnection) -> None:
    assert await echo(["k"], ["a"]) == [b"k", b"a"]
    await redis.client_pause(60_000, all=False)  # ms: the server holds the answers of scripts back
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await echo(["k"], ["late"])
    await redis.client_unpause()
    assert await echo(["k"], ["b"]) == [b"k", b"b"]


async def test_an_error_reply_is_raised_and_the_next_run_answers(redis: Redis, echo: ScriptConnection) -> None:
    with pytest.raises(ResponseError, match="WRONG"):
        await echo(["k"], ["fail"])
    num_clients = len(await redis.client_list())
    assert await echo(["k"], ["a"]) == [b"k", b"a"]
    assert len(await redis.client_list()) == num_clients


async def test_runs_at_once_get_their_own_answers(echo: ScriptConnection) -> None:
    found = await asyncio.gather(*(echo(["k"], [number]) for number in range(20)))
    assert found == [[b"k", str(number).encode()] for number in range(20)]


async def test_a_closed_connection_may_be_closed_again(echo: ScriptConnection) -> None:
    await echo(["k"], ["a"])
    await echo.close()
    await echo.close()
