"""Faults of the state store's data: emptied, rolled back, full, unable to save. Called by `faults`.

They act on Redis itself, past the proxies. A roll-back returns exactly the keys of a snapshot, with the time to live
that they had, as the restore of an old file or a promoted, lagging replica would.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from chaos.testbed.cluster import ChaosCluster, eventually

TINY_BYTES = 1
NEVER_FULL = "0"
UNWRITABLE_FILE = "unwritable"
SAVE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """All keys at one moment: name, serialised value, time to live in ms (0: none)."""

    entries: tuple[tuple[bytes, bytes, int], ...]


async def take_snapshot(cluster: ChaosCluster) -> StoreSnapshot:
    """Reads all keys."""
    entries = []
    async with _client(cluster) as client:
        async for key in client.scan_iter(count=1000):
            value, ttl_ms = await client.dump(key), await client.pttl(key)
            if value is not None:
                entries.append((key, value, max(0, ttl_ms)))
    return StoreSnapshot(tuple(entries))


async def roll_back(cluster: ChaosCluster, snapshot: StoreSnapshot) -> None:
    """Replaces all keys with those of `snapshot`, in one transaction."""
    async with _client(cluster) as client, client.pipeline(transaction=True) as pipeline:
        pipeline.flushall()
        for key, value, ttl_ms in snapshot.entries:
            pipeline.restore(key, ttl_ms, value)
        await pipeline.execute()


async def empty(cluster: ChaosCluster) -> None:
    """Deletes all keys; the server goes on."""
    async with _client(cluster) as client:
        await client.flushall()


async def fill(cluster: ChaosCluster) -> None:
    """Lets Redis refuse every write for lack of memory."""
    async with _client(cluster) as client:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", TINY_BYTES)


async def fill_disk(cluster: ChaosCluster) -> None:
    """Lets Redis refuse every write because it cannot save (MISCONF), as on a full disk.

    The name of the dump file is taken by a folder, so the save fails.
    """
    async with _client(cluster) as client:
        folder = str((await client.config_get("dir"))["dir"])
        await asyncio.to_thread(Path(folder, UNWRITABLE_FILE).mkdir, exist_ok=True)
        await client.config_set("dbfilename", UNWRITABLE_FILE)
        await client.config_set("stop-writes-on-bgsave-error", "yes")
        await client.config_set("save", "3600 1")
        await client.bgsave()

        async def failed() -> bool:
            return bool((await client.info("persistence"))["rdb_last_bgsave_status"] == "err")

        await eventually(failed, SAVE_TIMEOUT_S, "the save has failed")


async def restore_space(cluster: ChaosCluster) -> None:
    """Undoes `fill` and `fill_disk`."""
    async with _client(cluster) as client:
        await client.config_set("maxmemory", NEVER_FULL)
        await client.config_set("stop-writes-on-bgsave-error", "no")
        await client.config_set("save", "")


@contextlib.asynccontextmanager
async def _client(cluster: ChaosCluster) -> AsyncIterator[Redis]:
    assert cluster.redis.tcp_url is not None
    async with Redis.from_url(cluster.redis.tcp_url) as client:
        yield client
