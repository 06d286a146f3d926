"""A router's hold on its calls: renews its lease, and claims the calls of routers that have let theirs end.

One task. Nobody is an orphan to a router that has not had good answers for a whole lease: a book that was away, or that
has lost everything, makes all leases end at once, and their owners must first have a chance to renew them. Owned by the
router's `app`; knows no Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

import structlog

from baton.domain.ids import OwnerId, RequestId
from baton.state.base import CallRecord, CallStatus, CallStore, StateUnavailable
from baton.state.bell import rang_within

_log = structlog.get_logger(__name__)
RENEWALS = 4
"""How often a lease is renewed in its time."""


class Ownership:
    """Holds the lease of `owner`; `on_claimed` is awaited with each call that has been claimed for it."""

    def __init__(
        self,
        book: CallStore,
        owner: OwnerId,
        on_claimed: Callable[[CallRecord], Awaitable[None]],
        *,
        on_lapsed: Callable[[], None] = lambda: None,
        owner_ttl_s: float = 1.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`owner_ttl_s` is the book's (see `BookOptions`). `clock` is the running loop's unless given. `on_claimed`
        must be quick: a call that it refuses with an exception is logged, and stays ours. `on_lapsed` hears of a
        renewal that came after the lease's end: any of our calls may be somebody else's by now."""
        self._book = book
        self._owner = owner
        self._on_claimed = on_claimed
        self._on_lapsed = on_lapsed
        self._ttl_s = owner_ttl_s
        self._clock = clock or _loop_time
        self._held_until = 0.0
        self._good_since: float | None = None
        self._claiming = True
        self._unsure: dict[RequestId, CallRecord] = {}  # as they were when a claim was not answered with a grant
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def owner(self) -> OwnerId:
        return self._owner

    @property
    def held(self) -> bool:
        """Whether the lease runs for sure, by our clock since before the last renewal; if not, others may claim."""
        return self._clock() < self._held_until

    @property
    def may_claim(self) -> bool:
        """Whether every living owner has had a whole lease's time to renew its own since the book last failed us."""
        return self._claiming and self._good_since is not None and self._clock() - self._good_since >= self._ttl_s

    def start(self) -> None:
        """Starts the task, inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="state-ownership")

    def stop_claiming(self) -> None:
        """From now on the lease is held, and nothing is claimed any more: the router drains."""
        self._claiming = False

    async def close(self) -> None:
        """Stops the task and lets the calls go, so that nobody need wait for the lease's end. Idempotent."""
        if self._task is None or self._closing.is_set():
            return
        self._closing.set()
        self._task.cancel()
        await asyncio.wait([self._task], timeout=self._ttl_s)
        self._held_until = 0.0
        try:
            async with asyncio.timeout(self._ttl_s):
                await self._book.let_go(self._owner)
        except (StateUnavailable, TimeoutError):
            _log.warning("calls_not_let_go", owner=self._owner)

    async def beat(self) -> None:
        """Renews the lease once and looks for orphans once; an outage is noted, not raised."""
        began = self._clock()
        try:
            async with asyncio.timeout(self._ttl_s / 2):
                await self._book.hold(self._owner)
            self._renewed(began)
            if self.may_claim:
                await self._settle()
                async with asyncio.timeout(self._ttl_s):
                    orphans = await self._book.orphans()
                await self._claim(orphans)
        except (StateUnavailable, TimeoutError) as error:
            self._failed(error)

    async def _run(self) -> None:
        while not self._closing.is_set():
            began = self._clock()
            await self.beat()
            await rang_within(self._closing, max(0.0, began + self._ttl_s / RENEWALS - self._clock()))

    def _renewed(self, began: float) -> None:
        late, is_first = began >= self._held_until, self._held_until == 0.0
        self._held_until = began + self._ttl_s
        if self._good_since is None or late:
            self._good_since = self._clock()
        if late and not is_first:
            _log.warning("lease_lapsed", owner=self._owner)
            self._on_lapsed()

    def _failed(self, error: Exception) -> None:
        if self._good_since is not None:
            _log.warning("lease_not_renewed", owner=self._owner, reason=str(error) or type(error).__name__)
        self._good_since = None

    async def _claim(self, orphans: list[CallRecord]) -> None:
        """Claims one after the other, as long as our own lease holds: others may be faster."""
        for call in orphans:
            if not self.held:
                return
            self._unsure[call.id] = call
            async with asyncio.timeout(self._ttl_s):
                claimed = await self._book.claim_call(call.id, call.epoch, self._owner)
            if claimed is not None:
                await self._claimed(call, claimed)

    async def _settle(self) -> None:
        """Asks what became of claims without a grant: the book may have granted one, and its answer was lost. Our own
        lease would then keep everybody else from the call for ever."""
        for id, call in list(self._unsure.items()):
            async with asyncio.timeout(self._ttl_s):
                now = await self._book.get_call(id)
            if now is not None and now.status is CallStatus.OPEN and now.owner == self._owner:
                await self._claimed(call, now)
            elif now is None or now.status is not CallStatus.OPEN or now.owner != call.owner:
                del self._unsure[id]

    async def _claimed(self, before: CallRecord, claimed: CallRecord) -> None:
        del self._unsure[claimed.id]
        _log.info("call_claimed", call_id=claimed.id, lost_owner=before.owner, epoch=claimed.epoch)
        await self._hand_over(claimed)

    async def _hand_over(self, call: CallRecord) -> None:
        try:
            await self._on_claimed(call)
        except Exception:  # the root of this call's new life here
            _log.exception("claimed_call_refused", call_id=call.id)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
