"""Store of views in this process's memory, for one-process serving and tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.domain.ids import OwnerId
from baton.store.store import StoreUnavailable
from baton.store.views.view_store import LISTED_S, MAX_LISTED, WATCH_TTL_S, StoredView, ViewExchange, check_size


@dataclass(frozen=True, slots=True)
class _Entry:
    at_s: float
    watching_until_s: float
    payload: bytes


class MemoryViewStore:
    """A `ViewStore` without a server. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[OwnerId, _Entry] = {}
        self._closed = False

    async def exchange(self, owner: OwnerId, payload: bytes, *, watching: bool) -> ViewExchange:
        check_size(payload)
        self._check_open()
        now = self._clock()
        self._entries[owner] = _Entry(now, now + WATCH_TTL_S if watching else 0.0, payload)
        self._entries = {id: entry for id, entry in self._entries.items() if now - entry.at_s <= LISTED_S}
        others = {id: entry for id, entry in self._entries.items() if id != owner}
        views = [StoredView(id, now - each.at_s, each.payload if watching else b"") for id, each in others.items()]
        watched = any(entry.watching_until_s > now for entry in others.values())
        return ViewExchange(watched, views[:MAX_LISTED])

    async def withdraw(self, owner: OwnerId) -> None:
        self._check_open()
        self._entries.pop(owner, None)

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("this store of views has been closed")
