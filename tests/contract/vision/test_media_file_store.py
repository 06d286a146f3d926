"""Files of images, in memory and in Redis, in clear and sealed; and what a writer of Redis can do to them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.store.media.media_file_store import FILE_OVERHEAD_BYTES, MediaFileStore, PutOutcome
from baton.store.media.redis_media_file_store import connect_media
from baton.store.options import StoreOptions
from baton.store.store import StoreUnavailable
from baton.telemetry.metrics import REGISTRY
from tests.contract.stores import RARE, TRUST

RED, BLUE = b"r" * 16, b"b" * 16
FILE, OTHER = b"\x89PNG of a client's diary" * 40, b"another file" * 80
COUNTED = len(FILE) + FILE_OVERHEAD_BYTES
LARGE = bytes(range(256)) * 1024
OpenMedia = Callable[..., MediaFileStore]


@pytest.fixture(params=["memory", "redis", "sealed"])
async def open_media(request: pytest.FixtureRequest) -> AsyncIterator[OpenMedia]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("server").url
    opened: list[MediaFileStore] = []

    def open_it(options: StoreOptions = RARE, max_bytes: int = 1 << 20) -> MediaFileStore:
        options = replace(options, prefix=f"test:{uuid.uuid4().hex}:")
        opened.append(connect_media(url, options, TRUST if request.param == "sealed" else OPEN_CLUSTER, max_bytes))
        return opened[-1]

    yield open_it
    for store in opened:
        await store.close()


async def test_a_file_comes_back_as_it_was_put(open_media: OpenMedia) -> None:
    store = open_media()
    assert await store.get("acme", RED) is None
    for identity, data in ((RED, FILE), (BLUE, LARGE)):
        assert await store.put("acme", identity, data) is PutOutcome.KEPT
        assert await store.get("acme", identity) == data
    assert await store.holds("acme", [RED, BLUE, RED])
    assert not await store.holds("acme", [RED, b"x" * 16])
    await store.discard("acme", RED)
    await store.discard("acme", RED)
    assert await store.get("acme", RED) is None


async def test_a_tenant_finds_its_own_files_only(open_media: OpenMedia) -> None:
    store = open_media()
    await store.put("acme", RED, FILE)
    for other in ("", "acm", "acmer", "mallory"):
        assert await store.get(other, RED) is None
        assert not await store.holds(other, [RED])
        await store.discard(other, RED)
    assert await store.get("acme", RED) == FILE


async def test_all_files_together_are_bounded(open_media: OpenMedia) -> None:
    store = open_media(max_bytes=2 * COUNTED + 100)
    assert await store.put("acme", RED, FILE) is PutOutcome.KEPT
    assert await store.put("acme", BLUE, FILE) is PutOutcome.KEPT
    assert await store.put("acme", b"g" * 16, FILE) is PutOutcome.FULL
    assert await store.put("mallory", RED, FILE) is PutOutcome.FULL, "the bound is that of all tenants"
    assert await store.get("acme", b"g" * 16) is None
    assert await store.put("acme", RED, FILE) is PutOutcome.KEPT, "what is stored needs no room"


async def test_a_removed_file_can_be_put_again_in_a_full_store(open_media: OpenMedia) -> None:
    store = open_media(max_bytes=COUNTED + 50)
    await store.put("acme", RED, FILE)
    await store.discard("acme", RED)
    assert await store.put("acme", RED, FILE) is PutOutcome.KEPT
    assert await store.get("acme", RED) == FILE


async def test_expired_files_make_room(open_media: OpenMedia) -> None:
    store = open_media(replace(RARE, retention_s=0.05), max_bytes=COUNTED + 50)
    await store.put("acme", RED, FILE)
    async with asyncio.timeout(5.0):
        while await store.put("acme", BLUE, OTHER) is PutOutcome.FULL:  # noqa: ASYNC110 - expiry sends no event
            await asyncio.sleep(0)  # or a store that never waits lets no deadline pass
    assert await store.get("acme", RED) is None


async def test_tiny_files_count_what_they_cost(open_media: OpenMedia) -> None:
    store = open_media(max_bytes=4 * (FILE_OVERHEAD_BYTES + 50))
    puts = [await store.put("acme", bytes([n]) * 16, b"tiny") for n in range(6)]
    assert puts.count(PutOutcome.KEPT) == 4


@pytest.fixture
async def shared(server) -> AsyncIterator[tuple[MediaFileStore, MediaFileStore, Redis, str]]:
    """Two stores of one cluster with room for two files and a half; files of the second one expire in 20 ms."""
    prefix, max_bytes = f"test:{uuid.uuid4().hex}:", 5 * COUNTED // 2
    options = [replace(RARE, prefix=prefix), replace(RARE, prefix=prefix, retention_s=0.02)]
    long, short = (connect_media(server.url, one, max_bytes=max_bytes) for one in options)
    async with Redis.from_url(server.url) as redis:
        yield long, short, redis, prefix
    for store in (long, short):
        await store.close()


async def until_gone(store: MediaFileStore, identity: bytes) -> None:
    async with asyncio.timeout(5.0):
        while await store.get("acme", identity) is not None:
            pass


async def counted(redis: Redis, prefix: str) -> int:
    return int(await redis.hget(f"{prefix}media-bytes", "") or -1)


async def test_expired_files_are_swept_while_others_stay(shared) -> None:
    long, short, redis, prefix = shared
    assert await long.put("acme", RED, FILE) is PutOutcome.KEPT
    assert await short.put("acme", BLUE, FILE) is PutOutcome.KEPT
    await until_gone(long, BLUE)
    assert await long.put("acme", b"g" * 16, FILE) is PutOutcome.KEPT
    assert await counted(redis, prefix) == 2 * (COUNTED + 1)
    assert await redis.zcard(f"{prefix}media-expiry") == 2


async def test_a_shorter_retention_shortens_nothing(shared) -> None:
    long, short, redis, prefix = shared
    await long.put("acme", RED, FILE)
    assert await short.put("acme", RED, FILE) is PutOutcome.KEPT
    await short.put("acme", BLUE, OTHER)
    await until_gone(long, BLUE)
    assert await long.holds("acme", [RED])
    for key in [*await names(redis, prefix), f"{prefix}media-expiry", f"{prefix}media-bytes"]:
        assert await redis.pttl(key) > RARE.retention_s * 900


async def test_a_put_sweeps_a_hundred_files_and_the_next_ones_the_rest(shared) -> None:
    long, _, redis, prefix = shared
    await long.put("acme", RED, FILE)
    expired = [f"expired-{n}" for n in range(250)]
    await redis.zadd(f"{prefix}media-expiry", dict.fromkeys(expired, 1))
    await redis.hset(f"{prefix}media-bytes", mapping=dict.fromkeys(expired[:-1], 1))  # the last one is not counted
    await redis.hincrby(f"{prefix}media-bytes", "", len(expired) - 1)
    for left in (150, 50, 0, 0):
        assert await long.put("acme", RED, FILE) is PutOutcome.KEPT
        assert await redis.zcard(f"{prefix}media-expiry") == 1 + left
    assert await counted(redis, prefix) == COUNTED + 1


async def test_concurrent_puts_of_routers_share_the_bound(open_media: OpenMedia) -> None:
    store = open_media(max_bytes=3 * (COUNTED + 50))
    puts = [store.put("acme", bytes([n]) * 16, FILE) for n in range(8)]
    assert (await asyncio.gather(*puts)).count(PutOutcome.KEPT) == 3


def unsealed(reason: str) -> float:
    return REGISTRY.get_sample_value("baton_store_unsealed_total", {"reason": reason}) or 0.0


@pytest.fixture
async def sealed(server) -> AsyncIterator[tuple[MediaFileStore, Redis, str]]:
    prefix = f"test:{uuid.uuid4().hex}:"
    store, redis = connect_media(server.url, replace(RARE, prefix=prefix), TRUST), Redis.from_url(server.url)
    yield store, redis, prefix
    await redis.aclose()
    await store.close()


async def names(redis: Redis, prefix: str) -> list[bytes]:
    return sorted([key async for key in redis.scan_iter(match=f"{prefix}media:*")])


async def test_redis_shows_neither_file_nor_identity_nor_tenant(sealed) -> None:
    store, redis, prefix = sealed
    await store.put("acme", RED, FILE)
    [key] = await names(redis, prefix)
    everything = key + await redis.get(key)
    for secret in (b"diary", b"acme", RED, RED.hex().encode()):
        assert secret not in everything
    assert 0 < await redis.pttl(key) <= RARE.retention_s * 1000


async def test_a_file_moved_to_the_name_of_another_is_not_used(sealed) -> None:
    store, redis, prefix = sealed
    await store.put("acme", RED, FILE)
    [stolen] = await names(redis, prefix)
    await store.put("mallory", BLUE, OTHER)
    [theirs] = [key for key in await names(redis, prefix) if key != stolen]
    before = unsealed("forged")
    await redis.copy(stolen, theirs, replace=True)
    assert await store.get("mallory", BLUE) is None
    assert unsealed("forged") == before + 1
    assert await store.get("acme", RED) == FILE


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"\x00" + FILE, "clear"),
        (b"", "unreadable"),
        (b"\x01short", "unreadable"),
        (b"\x01" + b"z" * 999, "unknown_key"),
    ],
)
async def test_a_forged_file_is_not_used_and_makes_way_for_the_right_one(sealed, blob, reason) -> None:
    store, redis, prefix = sealed
    await store.put("acme", RED, FILE)
    [key] = await names(redis, prefix)
    await redis.set(key, blob)
    before = unsealed(reason)
    assert await store.get("acme", RED) is None
    assert unsealed(reason) == before + 1
    assert not await store.holds("acme", [RED])
    assert await store.put("acme", RED, FILE) is PutOutcome.KEPT
    assert await store.get("acme", RED) == FILE


async def test_files_stay_readable_while_secrets_are_rotated(server) -> None:
    options = replace(RARE, prefix=f"test:{uuid.uuid4().hex}:")
    old, new = TRUST.secret, b"the next secret of the contract tests"
    writer, reader = (
        connect_media(server.url, options, trust) for trust in (ClusterTrust(old), ClusterTrust(new, second_secret=old))
    )
    await writer.put("acme", RED, FILE)
    assert await reader.get("acme", RED) == FILE
    assert await reader.holds("acme", [RED])
    for store in (writer, reader):
        await store.close()


async def test_a_server_that_was_emptied_starts_anew(sealed) -> None:
    store, redis, prefix = sealed
    await store.put("acme", RED, FILE)
    for key in [key async for key in redis.scan_iter(match=f"{prefix}*")]:
        await redis.delete(key)
    assert await store.get("acme", RED) is None
    assert await store.put("acme", RED, FILE) is PutOutcome.KEPT
    assert await redis.hget(f"{prefix}media-bytes", "") == str(COUNTED + 33).encode()


async def test_without_a_server_the_store_is_unavailable() -> None:
    store = connect_media("redis://127.0.0.1:1")
    for operation in (store.put("", RED, FILE), store.get("", RED), store.holds("", [RED]), store.discard("", RED)):
        with pytest.raises(StoreUnavailable):
            await operation
    await store.close()
