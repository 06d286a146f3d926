"""`x-baton-durable` is true of what Redis keeps: a real router before a real Redis."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis

from baton.store.connect import connect
from baton.store.options import StoreOptions
from tests.redis_server import running_redis
from tests.service.takeover.router_cluster import COMPLETIONS, TIMEOUT_S, Router, router_cluster

BODY = {"model": "mock", "prompt": [1, 2], "max_tokens": 2}


async def headers(router: Router) -> tuple[str, str | None]:
    got: Any = (await router.http.post(COMPLETIONS, json=BODY)).headers
    return got["x-baton-durable"], got.get("x-baton-durable-scope")


async def until(router: Router, expected: tuple[str, str | None]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await headers(router) != expected:
            pass


async def doubted(router: Router) -> None:
    """The store is away for a moment: the router reads what it keeps again."""
    router.store.away = True
    await until(router, ("false", None))
    router.store.away = False


async def test_the_header_follows_what_redis_keeps(tmp_path):
    with running_redis(durable=True) as server:
        store = await connect(server.url, StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
        async with router_cluster(tmp_path, num_routers=1, store=store) as w, Redis.from_url(server.url) as redis:
            router = w.routers[0]
            assert await headers(router) == ("true", "restart")
            await redis.config_set("appendfsync", "always")
            await doubted(router)
            await until(router, ("true", "host"))
            await redis.config_set("appendonly", "no")
            await doubted(router)
            await until(router, ("false", "router"))


async def test_a_store_that_was_emptied_is_read_again_at_once(tmp_path):
    """The router reads it once a minute otherwise."""
    with running_redis(durable=True) as server:
        store = await connect(server.url, StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
        async with router_cluster(tmp_path, num_routers=1, store=store) as w, Redis.from_url(server.url) as redis:
            await until(w.routers[0], ("true", "restart"))
            await redis.config_set("appendonly", "no")
            assert await headers(w.routers[0]) == ("true", "restart")
            await redis.flushall()
            await until(w.routers[0], ("false", "router"))


async def test_a_server_without_a_file_makes_no_call_durable(tmp_path):
    with running_redis() as server:
        store = await connect(server.url, StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
        async with router_cluster(tmp_path, num_routers=1, store=store) as w:
            assert await headers(w.routers[0]) == ("false", "router")
