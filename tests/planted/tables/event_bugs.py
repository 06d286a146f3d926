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
    PlantedBug(
        EVENTS,
        "a gap is not counted",
        "services/router/dispatch/cache_index/reader.py",
        "INDEX_GAP_TOTAL.inc()",
        "pass",
        "tests/unit/router/dispatch/test_cache_index.py",
    ),
    PlantedBug(
        EVENTS,
        "an unfinished snapshot is applied",
        "services/router/dispatch/cache_index/reader.py",
        "if message.more:",
        "if False:",
        "tests/unit/router/dispatch/test_cache_index.py",
    ),
    PlantedBug(
        EVENTS,
        "a removed page is expected on",
        "services/router/dispatch/cache_index/index.py",
        "for key in removed:\n            self._expected.pop((worker, key), None)",
        "for key in removed:",
        "tests/unit/router/dispatch/test_cache_index.py",
    ),
)
