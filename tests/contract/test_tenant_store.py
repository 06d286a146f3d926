"""Token buckets and shared service, in memory and in Redis."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from baton.domain.ids import OwnerId
from baton.store.tenants.redis_tenant_store import connect_tenants
from baton.store.tenants.tenant_store import RateTake, TenantStore
from tests.contract.stores import RARE

ONE_MINUTE_S = 60.0
A, B = OwnerId("router-a/1"), OwnerId("router-b/1")


@pytest.fixture(params=["memory", "redis"])
async def tenants(request: pytest.FixtureRequest) -> AsyncIterator[TenantStore]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("server").url
    store = connect_tenants(url, replace(RARE, prefix=f"test:{uuid.uuid4().hex}:"))
    yield store
    await store.close()


def take(amount: float, per_minute: float = 60.0, bucket: str = "alice:requests") -> RateTake:
    return RateTake(bucket, amount, per_minute)


async def test_a_full_bucket_gives_one_minute_and_no_more(tenants):
    assert [await tenants.take([take(20)]) for _ in range(3)] == [0.0] * 3
    wait_s = await tenants.take([take(20)])
    assert wait_s == pytest.approx(20.0, abs=1.0)
    assert await tenants.take([take(20, bucket="bob:requests")]) == 0.0


async def test_all_amounts_are_taken_or_none(tenants):
    both = [take(30), take(900, 1000.0, "alice:tokens")]
    assert await tenants.take(both) == 0.0
    assert await tenants.take(both) == pytest.approx(48.0, abs=1.0)
    assert await tenants.take([take(30)]) == 0.0, "the refused take left the other bucket as it was"


async def test_an_amount_over_a_full_bucket_passes_when_it_is_full(tenants):
    assert await tenants.take([take(120)]) == 0.0
    assert await tenants.take([take(1)]) == pytest.approx(61.0, abs=1.0)


async def test_a_refund_gives_back_and_never_more_than_full(tenants):
    assert await tenants.take([take(60)]) == 0.0
    assert await tenants.take([take(-50)]) == 0.0
    assert await tenants.take([take(50)]) == 0.0
    assert await tenants.take([take(-500)]) == 0.0
    assert await tenants.take([take(60)]) == 0.0
    assert await tenants.take([take(1)]) > 0.0


async def test_an_overdraft_passes_and_is_refilled_first(tenants):
    assert await tenants.take([take(60)]) == 0.0
    assert await tenants.take([take(30)], overdraw=True) == 0.0
    assert await tenants.take([take(1)]) == pytest.approx(31.0, abs=1.0)


async def test_concurrent_takes_of_many_routers_share_one_bucket(tenants):
    waits = await asyncio.gather(*(tenants.take([take(1, 30.0)]) for _ in range(50)))
    assert waits.count(0.0) in (30, 31)


async def test_totals_of_others_are_returned_as_often_as_they_are_asked_for(tenants):
    assert await tenants.share_service(A, {"alice": 3.0}) == {}
    assert await tenants.share_service(B, {"alice": 5.5, "bob": 1.0}) == {A: {"alice": 3.0}}
    for _ in range(2):
        assert await tenants.share_service(A, {"alice": 4.0}) == {B: {"alice": 5.5, "bob": 1.0}}


async def test_an_unreadable_entry_of_another_router_is_skipped(server):
    prefix = f"test:{uuid.uuid4().hex}:"
    store, outside = connect_tenants(server.url, replace(RARE, prefix=prefix)), Redis.from_url(server.url)
    for value in ("9999999999999 no json", "no time"):
        await outside.hset(f"{prefix}service", "router-x", value)
        assert await store.share_service(A, {}) == {}
    await outside.aclose()
    await store.close()
