"""A real Redis: what it says of itself, and what it keeps when it is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from baton.domain.ids import OwnerId, RequestId
from baton.store.connect import connect
from baton.store.store import CallRecord, CallStatus, Durability, StateStore
from services.cli.processes.local_redis import LocalRedis
from tests.contract.stores import RARE
from tests.redis_server import running_redis

NUM_CALLS = 200


@pytest.fixture
async def durable() -> AsyncIterator[tuple[LocalRedis, StateStore, Redis]]:
    with running_redis(durable=True) as server:
        store, redis = await connect(server.url, RARE), Redis.from_url(server.url)
        yield server, store, redis
        await redis.aclose()
        await store.close()


async def test_a_server_without_a_file_keeps_nothing(server: LocalRedis) -> None:
    store = await connect(server.url, RARE)
    assert await store.durability() is Durability.ROUTER
    await store.close()
    memory = await connect("memory://")
    assert await memory.durability() is Durability.NONE


async def test_changes_of_the_configuration_are_seen(durable: tuple[LocalRedis, StateStore, Redis]) -> None:
    _, store, redis = durable
    assert await store.durability() is Durability.RESTART
    await redis.config_set("appendfsync", "always")
    assert await store.durability() is Durability.HOST
    await redis.config_set("maxmemory", 1 << 30)
    assert await store.durability() is Durability.HOST
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    assert await store.durability() is Durability.ROUTER
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("appendonly", "no")
    assert await store.durability() is Durability.ROUTER


async def test_without_config_a_server_keeps_at_most_a_restart(durable: tuple[LocalRedis, StateStore, Redis]) -> None:
    server, _, redis = durable
    await redis.config_set("appendfsync", "always")
    await redis.acl_setuser("default", enabled=True, nopass=True, commands=["-config"])
    limited = await connect(server.url, RARE)
    assert await limited.durability() is Durability.RESTART
    await limited.close()


async def test_a_killed_durable_server_has_every_acknowledged_call(
    durable: tuple[LocalRedis, StateStore, Redis],
) -> None:
    server, store, _ = durable
    for number in range(NUM_CALLS):
        id, owner = RequestId(f"call-{number}"), OwnerId("router-0/a1")
        await store.put_call(CallRecord(id, owner, 1, CallStatus.OPEN, "/v1/completions", b"{}", "", 17, 5, ()))
    server.kill()
    server.start()
    again = await connect(server.url, RARE)
    found = [await again.get_call(RequestId(f"call-{number}")) for number in range(NUM_CALLS)]
    assert sum(call is not None for call in found) == NUM_CALLS
    await again.close()
