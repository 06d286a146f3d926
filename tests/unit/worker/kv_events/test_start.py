"""The publisher of a worker: none without an endpoint, and errors that name the setting."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack

import pytest

from baton.domain.ids import PageId
from baton.kv.events.event import CacheEvent, StoredEvent
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.decode.settings import DecodeSettings
from baton.settings.base import SettingsError
from baton.worker.event_log import SharedEventLog
from baton.worker.kv_events.start import start_kv_events

HERE = "tcp://127.0.0.1:*"


def test_without_an_endpoint_nothing_is_bound():
    assert start_kv_events(DecodeSettings(), 16, AsyncExitStack()) is None


def test_an_address_that_cannot_be_bound_is_named():
    used = "ipc:///nowhere/at/all"
    with pytest.raises(SettingsError, match="kv_events_endpoint=ipc:///nowhere/at/all"):
        start_kv_events(DecodeSettings(kv_events_endpoint=used), 16, AsyncExitStack())


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(SettingsError, match=r"baton-serve\[zmq\]"):
        start_kv_events(DecodeSettings(kv_events_endpoint=HERE), 16, AsyncExitStack())


def fill(cache: PrefixCache, tokens: list[int]) -> list[PageId]:
    table = PageTable(cache, 2, "", Hold.LIVE)
    assert table.extend(len(tokens))
    table.cache_full_pages(tokens, len(tokens))
    return table.pages


def test_only_a_publisher_gets_tokens_and_the_ring_keeps_none():
    published: list[CacheEvent] = []
    for publish in (published.extend, None):
        cache, events = PrefixCache(PagePool(8)), SharedEventLog()
        events.attach(cache, publish)
        fill(cache, [1, 2, 3, 4, 5])
        assert cache.events is not None
        cache.events.flush()
        assert all(event.content.tokens == () for event in events._log._ring if isinstance(event, StoredEvent))
        assert events.since(0) is not None
    assert [event.content.tokens for event in published if isinstance(event, StoredEvent)] == [(1, 2), (3, 4)]
