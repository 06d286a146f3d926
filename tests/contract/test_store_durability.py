"""A real Redis: what it says of itself, and what it keeps when it is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from baton.domain.ids import OwnerId, RequestId
from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.connect import connect
from baton.store.store import CallRecord, CallStatus, Durability, StateStore
from chaos.testbed.clocks import compile_preloaded
from tests.contract.stores import DEADLINE_S, RARE
from tests.redis_server import require_redis, running_redis

NUM_CALLS = 200
NUM_KILLS = 3
SLOW_FSYNC = r"""
#include <unistd.h>
extern "C" int fdatasync(int) { return sleep(60), 0; }
extern "C" int fsync(int) { return sleep(60), 0; }
"""


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


async def test_without_config_nothing_is_promised(durable: tuple[LocalRedis, StateStore, Redis]) -> None:
    server, _, redis = durable
    await redis.config_set("appendfsync", "always")
    await redis.acl_setuser("default", enabled=True, nopass=True, commands=["-config"])
    limited = await connect(server.url, RARE)
    assert await limited.durability() is Durability.ROUTER
    await limited.close()


async def test_a_killed_durable_server_has_every_acknowledged_call(
    durable: tuple[LocalRedis, StateStore, Redis],
) -> None:
    server, store, _ = durable
    for number in range(NUM_CALLS):
        await store.put_call(_call(number))
    assert await _found_after_a_kill(server) == NUM_CALLS


@pytest.mark.parametrize(
    ("fsync", "level", "loses"), [("no", Durability.RESTART, 0), ("everysec", Durability.ROUTER, 1)]
)
async def test_what_an_answer_is_worth_while_the_disk_is_slow(
    fsync: str, level: Durability, loses: int, slow_disk: tuple[LocalRedis, StateStore, Redis]
) -> None:
    """Redis's default answers before it writes, and says `router`; ours writes first, and says `restart`."""
    server, store, redis = slow_disk
    num_lost = 0
    for number in range(NUM_KILLS):  # a kill that is 2 s late finds the write done
        await redis.config_set("appendfsync", "everysec")
        await _until_an_fsync_runs(redis)
        await redis.config_set("appendfsync", fsync)
        assert await store.durability() is level
        await store.put_call(_call(number))
        num_lost += number + 1 - num_lost - await _found_after_a_kill(server)
    assert min(num_lost, 1) == loses


@pytest.fixture
async def slow_disk(tmp_path: Path) -> AsyncIterator[tuple[LocalRedis, StateStore, Redis]]:
    """A durable server on which an fsync takes a minute."""
    require_redis()
    source = tmp_path / "slow_fsync.cpp"
    source.write_text(SLOW_FSYNC)
    library = compile_preloaded(source, tmp_path)
    if library is None:
        pytest.skip("no C++ compiler")
    with LocalRedis(durable=True, environment={"LD_PRELOAD": str(library)}) as server:
        store, redis = await connect(server.url, RARE), Redis.from_url(server.url)
        yield server, store, redis
        await redis.aclose()
        await store.close()
        server.kill()  # it would wait for its fsync


def _call(number: int) -> CallRecord:
    owner = OwnerId("router-0/a1")
    return CallRecord(RequestId(f"call-{number}"), owner, 1, CallStatus.OPEN, "/v1/completions", b"{}", "", 17, 5, ())


async def _until_an_fsync_runs(redis: Redis) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not (await redis.info("persistence"))["aof_pending_bio_fsync"]:
            await redis.set("other", 1)  # an fsync begins with a write, once a second


async def _found_after_a_kill(server: LocalRedis) -> int:
    server.kill()
    server.start()
    store = await connect(server.url, RARE)
    try:
        found = [await store.get_call(RequestId(f"call-{number}")) for number in range(NUM_CALLS)]
    finally:
        await store.close()
    return sum(call is not None for call in found)
