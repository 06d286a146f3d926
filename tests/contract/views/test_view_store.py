"""Views that routers share, in memory, in Redis, and sealed in Redis; and who may write them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest
from redis.asyncio import Redis

from baton.domain.ids import OwnerId
from baton.domain.trust import OPEN_CLUSTER
from baton.store.options import StoreOptions
from baton.store.store import StoreUnavailable
from baton.store.views.memory_view_store import MemoryViewStore
from baton.store.views.redis_view_store import RedisViewStore, connect_views
from baton.store.views.view_store import LISTED_S, MAX_LISTED, MAX_VIEW_BYTES, WATCH_TTL_S, ViewExchange, ViewStore
from tests.contract.stores import RARE, TRUST

A, B, C = OwnerId("router-a/1"), OwnerId("router-b/1"), OwnerId("router-c/1")


def options() -> StoreOptions:
    return replace(RARE, prefix=f"test:{uuid.uuid4().hex}:")


@pytest.fixture(params=["memory", "redis", "sealed"])
async def views(request: pytest.FixtureRequest) -> AsyncIterator[ViewStore]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("server").url
    store = connect_views(url, options(), TRUST if request.param == "sealed" else OPEN_CLUSTER, "tiny")
    yield store
    await store.close()


def payloads(found: ViewExchange) -> dict[OwnerId, bytes]:
    return {view.owner: view.payload for view in found.views}


async def test_others_learn_that_somebody_watches_and_their_views_come(views):
    alone = await views.exchange(A, b"", watching=False)
    assert (alone.watched, payloads(alone)) == (False, {}), "its own watching and its own view are not returned"
    assert payloads(await views.exchange(B, b"", watching=True)) == {A: b""}
    assert (await views.exchange(A, b"", watching=False)).watched
    shared = await views.exchange(A, b"a \0 view", watching=False)
    assert (shared.watched, payloads(shared)) == (True, {B: b""}), "who does not watch gets names only"
    found = await views.exchange(B, b"", watching=True)
    assert (found.watched, payloads(found)) == (False, {A: b"a \0 view"})
    assert found.views[0].age_s < 5.0
    await views.exchange(A, b"", watching=False)
    assert payloads(await views.exchange(B, b"", watching=True)) == {A: b""}, "a router that stops sharing has no view"


async def test_a_router_that_leaves_is_not_listed(views):
    for owner in (A, B):
        await views.exchange(owner, b"view", watching=False)
    await views.withdraw(A)
    assert payloads(await views.exchange(C, b"", watching=True)) == {B: b"view"}


async def test_a_view_and_a_list_are_bounded(views):
    with pytest.raises(ValueError, match=str(MAX_VIEW_BYTES)):
        await views.exchange(A, bytes(MAX_VIEW_BYTES + 1), watching=False)
    largest = bytes(MAX_VIEW_BYTES)
    await views.exchange(A, largest, watching=False)
    assert payloads(await views.exchange(B, b"", watching=True)) == {A: largest}
    for n in range(MAX_LISTED + 3):
        await views.exchange(OwnerId(f"r/{n}"), b"", watching=False)
    assert len((await views.exchange(B, b"", watching=True)).views) == MAX_LISTED


async def test_watching_and_listing_end_by_themselves():
    now = 0.0
    views = MemoryViewStore(lambda: now)
    await views.exchange(A, b"", watching=True)
    now = WATCH_TTL_S
    assert not (await views.exchange(B, b"view", watching=False)).watched
    now = WATCH_TTL_S + LISTED_S + 0.1
    assert payloads(await views.exchange(A, b"", watching=True)) == {}
    await views.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await views.exchange(A, b"", watching=True)


async def test_entries_of_the_past_are_removed_from_redis(server):
    chosen = options()
    views, outside = RedisViewStore(server.url, chosen, model="tiny"), Redis.from_url(server.url)
    await views.exchange(A, b"view", watching=False)
    [listed] = [key async for key in outside.scan_iter(f"{chosen.prefix}routers:*")]
    shown = listed.replace(b"routers:", b"router-views:")
    for value in ("1 1", "no time", ""):
        await outside.hset(listed, "old/1", value)
        await outside.hset(shown, "old/1", "view")
        assert payloads(await views.exchange(B, b"", watching=True)) == {A: b"view"}
        assert not await outside.hexists(listed, "old/1")
        assert not await outside.hexists(shown, "old/1")
    assert 0 < await outside.pttl(listed) <= 1000 * LISTED_S
    assert 0 < await outside.pttl(shown) <= 1000 * LISTED_S
    await outside.aclose()
    await views.close()


async def test_who_writes_redis_without_the_secret_shows_nothing(server):
    """Clear, forged, another router's and far too long: the fault is told, and nobody else's view is lost."""
    chosen = options()
    views, outside = RedisViewStore(server.url, chosen, TRUST, "tiny"), Redis.from_url(server.url)
    for owner in (A, B):
        await views.exchange(owner, b"view of " + owner.encode(), watching=False)
    [shown] = [key async for key in outside.scan_iter(f"{chosen.prefix}router-views:*")]
    own = cast("bytes", await outside.hget(shown, A))
    assert b"view of" not in own, "tenants' names and ids are sealed"
    forged = bytes([*own[:-1], own[-1] ^ 1])
    moved = cast("bytes", await outside.hget(shown, B))
    attacks = ((b"\0clear", "clear"), (forged, "forged"), (moved, "forged"), (bytes(1 << 20), "unreadable"))
    for blob, fault in attacks:
        await outside.hset(shown, A, blob)
        found = {view.owner: view for view in (await views.exchange(C, b"", watching=True)).views}
        assert (found[A].payload, found[A].fault) == (b"", fault)
        assert found[B].payload == b"view of " + B.encode()
    await outside.aclose()
    await views.close()


async def test_routers_of_another_model_do_not_meet(server):
    chosen = options()
    one, other = (RedisViewStore(server.url, chosen, model=model) for model in ("tiny", "large"))
    await one.exchange(A, b"view", watching=True)
    found = await other.exchange(B, b"", watching=True)
    assert (found.watched, payloads(found)) == (False, {})
    await one.close()
    await other.close()
