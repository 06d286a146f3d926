"""The durability of Redis is what INFO and CONFIG GET show, and a doubt lowers it at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.store.durability import DurabilityWatcher, redis_durability
from baton.store.store import Durability, StoreUnavailable

AOF = {"aof_enabled": 1, "aof_last_write_status": "ok", "loading": 0, "maxmemory": 0, "maxmemory_policy": "noeviction"}
NO_FSYNC = {"appendfsync": "no", "min-replicas-to-write": "0"}


@pytest.mark.parametrize(
    ("info", "config", "expected"),
    [
        ({}, NO_FSYNC, Durability.RESTART),
        ({"maxmemory": 1 << 30}, NO_FSYNC, Durability.RESTART),
        ({"maxmemory_policy": "allkeys-lru"}, NO_FSYNC, Durability.RESTART),  # without maxmemory nothing is evicted
        ({"maxmemory": 1 << 30, "maxmemory_policy": "allkeys-lru"}, NO_FSYNC, Durability.ROUTER),
        ({"maxmemory": 1 << 30, "maxmemory_policy": "volatile-ttl"}, NO_FSYNC, Durability.ROUTER),
        ({"aof_enabled": 0}, NO_FSYNC, Durability.ROUTER),
        ({"aof_enabled": 0}, {**NO_FSYNC, "min-replicas-to-write": "1"}, Durability.ROUTER),
        ({"aof_last_write_status": "err"}, NO_FSYNC, Durability.ROUTER),
        ({"loading": 1}, NO_FSYNC, Durability.ROUTER),
        ({}, {"appendfsync": "always"}, Durability.HOST),
        ({}, {**NO_FSYNC, "min-replicas-to-write": "1"}, Durability.HOST),
        ({}, {**NO_FSYNC, "appendfsync": "everysec"}, Durability.ROUTER),  # may answer before it writes
        ({}, {"appendfsync": "everysec", "min-replicas-to-write": "1"}, Durability.ROUTER),
        ({}, {}, Durability.ROUTER),  # CONFIG is refused
    ],
)
def test_each_reading_has_one_level(info: dict[str, Any], config: dict[str, str], expected: Durability):
    assert redis_durability(AOF | info, config) is expected


@pytest.mark.parametrize("missing", ["aof_enabled", "aof_last_write_status", "loading"])
def test_a_field_that_is_missing_promises_nothing(missing: str):
    info = {name: value for name, value in AOF.items() if name != missing}
    assert redis_durability(info, NO_FSYNC) is Durability.ROUTER


class ScriptedSource:
    """Gives one reading after another; waits where there is none."""

    def __init__(self) -> None:
        self.readings: asyncio.Queue[Durability | None] = asyncio.Queue()

    async def durability(self) -> Durability:
        level = await self.readings.get()
        if level is None:
            raise StoreUnavailable("away")
        return level


async def until(watcher: DurabilityWatcher, level: Durability) -> None:
    for _ in range(5000):
        if watcher.level is level:
            return
        await asyncio.sleep(0.001)
    pytest.fail(f"the level stays {watcher.level}")


async def test_a_doubt_lowers_the_level_until_the_next_reading():
    source = ScriptedSource()
    async with DurabilityWatcher(source, interval_s=60.0) as watcher:
        assert watcher.level is Durability.ROUTER
        source.readings.put_nowait(Durability.HOST)
        await until(watcher, Durability.HOST)
        watcher.recheck()
        assert watcher.level is Durability.ROUTER
        source.readings.put_nowait(Durability.RESTART)
        await until(watcher, Durability.RESTART)


async def test_a_store_that_is_away_promises_nothing_and_is_read_again():
    source = ScriptedSource()
    async with DurabilityWatcher(source, interval_s=0.01, retry_s=0.01) as watcher:
        for level in (Durability.RESTART, None, Durability.RESTART):
            source.readings.put_nowait(level)
            await until(watcher, level or Durability.ROUTER)


async def test_a_doubt_during_a_reading_makes_it_void():
    source = ScriptedSource()
    async with DurabilityWatcher(source, interval_s=60.0) as watcher:
        await asyncio.sleep(0)  # the first reading is under way
        watcher.recheck()
        source.readings.put_nowait(Durability.HOST)
        for _ in range(10):
            await asyncio.sleep(0)
            assert watcher.level is Durability.ROUTER
        assert source.readings.empty()
        source.readings.put_nowait(Durability.RESTART)
        await until(watcher, Durability.RESTART)
