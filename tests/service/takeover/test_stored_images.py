"""Files of images in the state store: real routers before a real Redis, and `x-baton-durable` for calls with images."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.domain.ids import RequestId
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.store import CallStatus
from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.redis_server import running_redis
from tests.service.takeover.router_cluster import CHAT, TIMEOUT_S, RouterCluster, opened, resumed, router_cluster
from tests.service.takeover.test_images import ALL, RED, messages
from tests.unit.router.vision.pictures import coloured, picture
from tests.unit.router.vision.vision_models import load_vision_model, save_vision_model

HOLD = (ScriptedAction(Phase.DECODE, Hold(), index=4, times=1),)
MEDIA = "baton:media:*"


@asynccontextmanager
async def world(
    directory: Any, *, num_routers: int = 1, decode: Sequence[ScriptedAction] = (), **settings: Any
) -> AsyncIterator[tuple[RouterCluster, Redis]]:
    """Routers of a model with images, before one durable Redis."""
    save_vision_model(directory)
    model = load_vision_model(directory)
    with running_redis(durable=True) as server:
        store = await connect(server.url, StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
        options = {"store": store, "model": model, "redis_url": server.url, **settings}
        async with (
            router_cluster(directory, num_routers=num_routers, decode=decode, **options) as w,
            Redis.from_url(server.url) as redis,
        ):
            yield w, redis


async def files(redis: Redis) -> list[bytes]:
    return [key async for key in redis.scan_iter(match=MEDIA)]


async def until_files(w: RouterCluster, redis: Redis, num: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while len(await files(redis)) != num:
            await w.routers[0].http.get("/health")


async def test_a_call_is_durable_if_and_only_if_its_files_are_stored(tmp_path):
    async with world(tmp_path, max_stored_media_mib=1) as (w, redis):
        async with opened(w.routers[0], CHAT, messages=messages(RED, coloured("blue")), max_tokens=2) as stream:
            assert stream.response.headers["x-baton-durable"] == "true"
            assert len(await files(redis)) == 2
            events = await stream.rest()
        async with resumed(w.routers[0], stream.call_id) as again:
            assert again.response.headers["x-baton-durable"] == "true"
            assert [event.data for event in await again.rest()] == [event.data for event in events]
        await redis.delete(*await files(redis))
        async with resumed(w.routers[0], stream.call_id) as again:
            assert again.response.headers["x-baton-durable"] == "false", "the store is asked, not remembered"
        too_large = picture(640, 600)  # noise does not compress
        assert len(too_large) > 1024 * 1024
        async with opened(w.routers[0], CHAT, messages=messages(RED, too_large), max_tokens=2) as stream:
            assert stream.response.headers["x-baton-durable"] == "false"
            assert len(await stream.rest()) >= 2


async def test_a_private_call_stores_no_file(tmp_path):
    async with world(tmp_path) as (w, redis):
        body = {"model": "mock", "messages": messages(RED), "max_tokens": 2}
        response = await w.routers[0].http.post(CHAT, json=body, headers={"x-baton-store": "none"})
        assert response.headers["x-baton-durable"] == "false"
        assert await files(redis) == []


async def taken_over(w: RouterCluster, id: str) -> tuple[int, str]:
    """Cuts the first router off; the tokens and the failure of the call after the other one has taken it over."""
    w.routers[0].store.away = True
    await w.until_owned(id, "router-1")
    await w.until(id, CallStatus.ENDED)
    journal = await w.store.read_journal(RequestId(id), 0, 1.0)
    w.routers[0].store.away = False
    return len(journal.tokens), journal.failure_code


@pytest.mark.parametrize("wrong", [None, b"", b"\x00no image", b"missing"])
async def test_another_router_brings_the_files_back(tmp_path, wrong):
    """No worker holds the image any more. A file that is missing or of other bytes is never sent in its name."""
    async with world(tmp_path, num_routers=2, decode=HOLD) as (w, redis):
        async with opened(w.routers[0], CHAT, messages=messages(RED), max_tokens=ALL) as stream:
            await stream.take(4)
            await w.until_emitted(stream.call_id, 4)
            media = w.cluster.prefills[0].media
            media.held.clear()
            [key] = await files(redis)
            if wrong == b"missing":
                await redis.delete(key)
            elif wrong is not None:
                await redis.set(key, wrong)
            ended = await taken_over(w, stream.call_id)
        assert ended == ((ALL, "") if wrong is None else (4, "need_media"))
        assert len(media.headers) == (2 if wrong is None else 1)


async def test_a_store_that_was_emptied_gets_the_files_again(tmp_path):
    """But for the workers' records, which mock workers announce once."""
    async with (
        world(tmp_path, num_routers=2, decode=HOLD) as (w, redis),
        opened(w.routers[0], CHAT, messages=messages(RED), max_tokens=ALL) as stream,
    ):
        await stream.take(4)
        await w.until_emitted(stream.call_id, 4)
        await redis.delete(*[key async for key in redis.scan_iter() if b":worker" not in key])
        assert await files(redis) == []
        await until_files(w, redis, 1)
        await w.until_emitted(stream.call_id, 4)
        w.cluster.prefills[0].media.held.clear()
        assert await taken_over(w, stream.call_id) == (ALL, "")
