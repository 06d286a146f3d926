"""Stores for the contract tests: memory, the Lua scripts in this process, a real Redis in clear and sealed. Each has a
key prefix of its own."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.redis.keys import RedisKeys
from baton.store.store import StateStore
from simulation.nodes.lua_store import LuaStore
from tests.contract.stores import RARE, TRUST, OpenStore
from tests.contract.strangers.stage import Stage
from tests.redis_server import running_redis


@pytest.fixture(scope="session")
def server() -> Iterator[LocalRedis]:
    with running_redis() as server:
        yield server


@pytest.fixture(params=["memory", "lua", "redis", "sealed"])
async def open_store(request: pytest.FixtureRequest) -> AsyncIterator[OpenStore]:
    in_process = request.param in ("memory", "lua")
    url = "memory://" if in_process else request.getfixturevalue("server").url
    trust = TRUST if request.param == "sealed" else OPEN_CLUSTER
    async with contextlib.AsyncExitStack() as stack:

        async def open_it(options: StoreOptions) -> StateStore:
            options = replace(options, prefix=f"test:{uuid.uuid4().hex}:")
            is_lua = request.param == "lua"
            store = LuaStore(options) if is_lua else await connect(url, options, trust)
            stack.push_async_callback(store.close)
            return store

        yield open_it


@pytest.fixture
async def store(open_store: OpenStore) -> StateStore:
    return await open_store(RARE)


@pytest.fixture
async def redis_store(server: LocalRedis) -> AsyncIterator[tuple[StateStore, RedisKeys, Redis]]:
    """A store, the names it uses, and a way to look at them from outside."""
    prefix = f"test:{uuid.uuid4().hex}:"
    store, outside = await connect(server.url, replace(RARE, prefix=prefix)), Redis.from_url(server.url)
    yield store, RedisKeys(prefix), outside
    await outside.aclose()
    await store.close()


@pytest.fixture
async def stage(server: LocalRedis, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    options = replace(RARE, prefix=f"test:{request.node.name}:")
    stores: list[StateStore] = []

    async def open_as(trust: ClusterTrust) -> StateStore:
        stores.append(await connect(server.url, options, trust))
        return stores[-1]

    redis = Redis.from_url(server.url)
    yield Stage(await open_as(TRUST), redis, RedisKeys(options.prefix), open_as)
    await redis.aclose()
    for store in stores:
        await store.close()
