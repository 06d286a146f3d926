"""Private calls (`x-baton-store: none`, or `--no-store-prompts`): Redis gets nothing of them, and their own router
resumes them from its memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.store.connect import connect
from baton.store.options import StoreOptions
from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.redis_server import running_redis
from tests.service.takeover.router_cluster import (
    COMPLETIONS,
    TIMEOUT_S,
    Router,
    RouterCluster,
    Stream,
    router_cluster,
    same,
    undisturbed,
)

pytestmark = pytest.mark.timeout(60)

BODY: dict[str, Any] = {"model": "mock", "prompt": [1, 2], "max_tokens": 8, "stream": True}
SSE = {"accept": "text/event-stream"}
PRIVATE = {**SSE, "x-baton-store": "none"}


@asynccontextmanager
async def streamed(router: Router, headers: dict[str, str], id: str = "", after: str = "") -> AsyncIterator[Stream]:
    """A new call, or the rest of call `id`."""
    method, path = ("GET", f"/v1/requests/{id}/stream") if id else ("POST", COMPLETIONS)
    headers = headers | ({"last-event-id": after} if after else {})
    async with router.http.stream(method, path, json=None if id else BODY, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response, response.aiter_lines())


@asynccontextmanager
async def redis_cluster(tmp_path, **options: Any) -> AsyncIterator[tuple[RouterCluster, Redis]]:
    with running_redis(durable=True) as server:
        store = await connect(server.url, StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
        async with router_cluster(tmp_path, store=store, **options) as w, Redis.from_url(server.url) as redis:
            yield w, redis


async def stored_names(redis: Redis) -> set[bytes]:
    """Names of the keys that belong to calls."""
    kinds = ("call", "calls", "sequence", "journal")
    return {name async for name in redis.scan_iter() if name.split(b":")[1].decode() in kinds}


@pytest.mark.parametrize("by_setting", [False, True])
async def test_redis_gets_nothing_of_a_private_call(tmp_path, by_setting):
    settings = {"store_prompts": False} if by_setting else {}
    async with redis_cluster(tmp_path, num_routers=1, **settings) as (w, redis):
        async with streamed(w.routers[0], SSE if by_setting else PRIVATE) as stream:
            assert stream.response.headers["x-baton-durable"] == "false"
            assert "x-baton-durable-scope" not in stream.response.headers
            assert len(await stream.rest()) == 9
        answer = await w.routers[0].http.get(f"/v1/requests/{stream.call_id}")
        assert answer.status_code == 200, "its own router has it"
        assert await stored_names(redis) == set()
        if not by_setting:
            async with streamed(w.routers[0], SSE) as stream:
                assert stream.response.headers["x-baton-durable-scope"] == "restart"
                await stream.rest()
            assert len(await stored_names(redis)) >= 3


@pytest.mark.parametrize("num_seen", [1, 4])
async def test_a_private_call_is_resumed_by_its_own_router_only(tmp_path, num_seen):
    held = [ScriptedAction(Phase.DECODE, Hold(), index=4)]
    async with redis_cluster(tmp_path, decode=held) as (w, redis):
        here, there = w.routers
        async with streamed(here, PRIVATE) as stream:
            seen = await stream.take(num_seen)
            id = stream.call_id
            await w.decode.reached(Phase.DECODE, times=4)
        await until_abandoned(here, id)
        w.decode.release()
        assert (await there.http.get(f"/v1/requests/{id}/stream")).status_code == 404
        async with streamed(here, SSE, id, seen[-1].id) as stream:
            assert stream.response.headers["x-baton-durable"] == "false"
            rest = await stream.rest()
        expected = await undisturbed(here, max_tokens=8)
        assert same(seen + rest, expected)
        names = await stored_names(redis)
        assert not [name for name in names if id.encode() in name]


async def until_abandoned(router: Router, id: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await router.http.get(f"/v1/requests/{id}")).json().get("status") != "abandoned":  # or 503, for a moment
            pass


async def test_another_value_of_the_header_is_refused(tmp_path):
    async with router_cluster(tmp_path, num_routers=1) as w:
        answer = await w.routers[0].http.post(COMPLETIONS, json=BODY, headers={"x-baton-store": "off"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "x-baton-store"
