"""Exchanges views with the other routers through the state store, about once a second. Started by `live_view`.

    nobody watches: one call a second lists this router, and tells whether another one watches
    another router watches: the call brings this router's share
    this router watches: the call returns the shares of the others

No router waits for another one: what does not come in time is missing from the view, and the view says so.
"""

from __future__ import annotations

import asyncio

from baton.domain.ids import OwnerId
from baton.services.router.cluster.feed import ClusterFeed
from baton.store.notifier import wait_for_event
from baton.store.store import StoreUnavailable
from baton.store.views.view_store import ViewStore
from baton.telemetry.logs import get_logger

INTERVAL_S = 1.0

log = get_logger(__name__)


class PeerExchange:
    """`owner`: the name of this router process in the store."""

    def __init__(self, store: ViewStore, owner: OwnerId, feed: ClusterFeed, interval_s: float = INTERVAL_S) -> None:
        self._store = store
        self._owner = owner
        self._feed = feed
        self._interval_s = interval_s
        self._watched = False
        self._away = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        feed.on_watch = self._wake.set

    def start(self) -> None:
        """Starts the task inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="peer-exchange")

    async def close(self) -> None:
        """Stops the task and takes this router off the list; idempotent. Does not close the store."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        try:
            await self._store.withdraw(self._owner)
        except StoreUnavailable:
            log.debug("view_not_withdrawn")  # it expires

    async def exchange(self) -> None:
        """One exchange; a second one if another router has begun to watch. Raises `StoreUnavailable`."""
        before = self._watched
        await self._once()
        if self._watched and not before:
            await self._once()

    async def _once(self) -> None:
        watching, view = self._feed.watched, self._feed.view
        found = await self._store.exchange(self._owner, view.share() if self._watched else b"", watching=watching)
        self._watched = found.watched
        view.take_peers(found.views, watching=watching)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.exchange()
                self._note(away=False)
            except StoreUnavailable as error:
                self._note(away=True, reason=str(error))
            except Exception:  # what another router shares must not end the view; the next reading may be right
                log.exception("peer_exchange_failed")
            await wait_for_event(self._wake, self._interval_s)

    def _note(self, *, away: bool, reason: str = "") -> None:
        if away and not self._away:
            log.warning("view_store_away", reason=reason)
        elif self._away and not away:
            log.info("view_store_back")
        self._away = away
