"""Remembers when the state store last lost data, so that a missing call is not taken for an unknown one. No I/O.

`app` notes each reset that the lease of this router finds; `resume` asks before it answers 404.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from baton.store.ownership import boot_time


class LossWatcher:
    """Owned by one event loop."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = boot_time) -> None:
        """`patience_s`: time after a loss until every living owner has put its calls again."""
        self._patience_s = patience_s
        self._clock = clock
        self._noted_at: float | None = None
        self._wait_for_renewal: Callable[[], Awaitable[bool]] | None = None

    def follow(self, wait_for_renewal: Callable[[], Awaitable[bool]]) -> None:
        """Sets the wait for the next renewal of the lease, which notes any loss up to now; False: the store is away."""
        self._wait_for_renewal = wait_for_renewal

    def note(self) -> None:
        """The store has lost data."""
        self._noted_at = self._clock()

    @property
    def recent(self) -> bool:
        """True while owners may still put calls again."""
        return self._noted_at is not None and self._clock() - self._noted_at < self._patience_s

    async def excuses_missing(self) -> bool:
        """True if a call that was missing just now may come back. Waits for the next renewal where none was noted."""
        if self.recent or self._wait_for_renewal is None:
            return self.recent
        return not await self._wait_for_renewal() or self.recent
