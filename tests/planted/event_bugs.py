"""Planted bugs in the events of prefix caches; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

EVENTS = "cache events"
KV = "tests/unit/kv"

EVENT_BUGS = (
    PlantedBug(
        EVENTS,
        "an evicted page is not reported",
        "baton/kv/prefix_cache.py",
        "self.events.removed(key)",
        "pass",
        "tests/property/kv/test_cache_events.py",
    ),
    PlantedBug(
        EVENTS,
        "a clear resets no reader",
        "baton/kv/events/log.py",
        "reset = True",
        "pass",
        "tests/property/kv/test_cache_events.py",
    ),
    PlantedBug(
        EVENTS,
        "a position behind the snapshot",
        "baton/kv/events/log.py",
        "return CacheDelta(0, self.seq,",
        "return CacheDelta(0, self.seq - 1,",
        f"{KV}/test_cache_events.py",
    ),
    PlantedBug(
        EVENTS,
        "an overwritten event is read",
        "baton/kv/events/log.py",
        "seq < self.seq - len(self._ring)",
        "seq < 0",
        f"{KV}/test_cache_events.py",
    ),
)
