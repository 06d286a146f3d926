"""The places of chats whose images are fetched at once: bounded, and shared among tenants.

A chat waits only while all places are taken, or its tenant has its share. A place that is given back goes to the tenant
that holds the fewest, first come, first served among its chats. So a tenant whose hosts hang delays its own chats.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.domain.errors import Overloaded

MAX_FETCHING_CHATS = 8
"""Chats of a router whose images are fetched at once. Each holds at most the files of one request."""
MAX_OF_TENANT = 6
"""Of one tenant."""


class FetchPlaces:
    """Owned by one event loop. `timeout_s`: longest wait for a place."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._taken: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], str] = {}  # in the order of arrival

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Holds a place for a chat of `tenant`; "" without API keys, where nobody has a share.

        Raises `Overloaded` for one that waited in vain.
        """
        await self._acquire(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def _acquire(self, tenant: str) -> None:
        if self._may_take(tenant):
            self._taken[tenant] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = tenant
        try:
            await asyncio.wait((turn,), timeout=self.timeout_s)
        except asyncio.CancelledError:
            if turn.done():  # its place was given at the moment in which its client left
                self._give_back(tenant)
            raise
        finally:
            self._waiting.pop(turn, None)
        if not turn.done():
            what = "images of this tenant" if self._has_share(tenant) else "images"
            raise Overloaded(f"too many {what} are fetched now: try again", retry_after_s=self.timeout_s)

    def _has_share(self, tenant: str) -> bool:
        """True if the tenant holds what one may hold."""
        return bool(tenant) and self._taken[tenant] >= MAX_OF_TENANT

    def _may_take(self, tenant: str) -> bool:
        return self._taken.total() < MAX_FETCHING_CHATS and not self._has_share(tenant)

    def _give_back(self, tenant: str) -> None:
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        ready = [(self._taken[waiter], turn) for turn, waiter in self._waiting.items() if self._may_take(waiter)]
        if ready:
            _, turn = min(ready, key=lambda one: one[0])  # of equals the one that came first
            self._taken[self._waiting.pop(turn)] += 1
            turn.set_result(None)
