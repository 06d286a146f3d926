"""Renews a router's owner lease and claims the calls of owners whose lease has ended.

One task. A router claims orphaned calls only after the store has answered it for one full lease. An outage, or a store
that lost everything, ends all leases at once; their owners must have time to renew them. Owned by the router's `app`;
knows no Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

import structlog

from baton.domain.ids import OwnerId, RequestId
from baton.store.notifier import wait_for_event
from baton.store.store import CallRecord, CallStatus, CallStore, StoreUnavailable

_log = structlog.get_logger(__name__)
RENEWALS_PER_TTL = 4
"""Renewals in one lease."""


class OwnerLease:
    """Renews the lease of `owner`, and awaits `on_claimed` with each call that it claims."""

    def __init__(
        self,
        store: CallStore,
        owner: OwnerId,
        on_claimed: Callable[[CallRecord], Awaitable[None]],
        *,
        on_expired: Callable[[], None] = lambda: None,
        owner_ttl_s: float = 1.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`owner_ttl_s` must equal that of `StoreOptions`. `clock` defaults to the running loop's.

        `on_claimed` must be quick. If it raises, the error is logged and the call stays with this owner. `on_expired`
        is called after a renewal that came too late: any call may have been claimed by another router.
        """
        self._store = store
        self._owner = owner
        self._on_claimed = on_claimed
        self._on_expired = on_expired
        self._ttl_s = owner_ttl_s
        self._clock = clock or _loop_time
        self._held_until = 0.0
        self._healthy_since: float | None = None
        self._claiming = True
        self._unconfirmed: dict[RequestId, CallRecord] = {}  # claims whose answer was lost
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
        """True while the lease has not expired, counted from before the last renewal."""
        return self._clock() < self._held_until

    @property
    def may_claim(self) -> bool:
        """True after one full lease of good answers, in which every live owner could renew its own lease."""
        return self._claiming and self._healthy_since is not None and self._clock() - self._healthy_since >= self._ttl_s

    def start(self) -> None:
        """Starts the task inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="store-ownership")

    def stop_claiming(self) -> None:
        """Keeps renewing the lease, but claims nothing more: the router drains."""
        self._claiming = False

    async def close(self) -> None:
        """Stops the task and releases the lease, so that others can claim at once; idempotent."""
        if self._task is None or self._closing.is_set():
            return
        self._closing.set()
        self._task.cancel()
        await asyncio.wait([self._task], timeout=self._ttl_s)
        self._held_until = 0.0
        try:
            async with asyncio.timeout(self._ttl_s):
                await self._store.release_lease(self._owner)
        except (StoreUnavailable, TimeoutError):
            _log.warning("call_release_failed", owner=self._owner)

    async def renew_and_claim(self) -> None:
        """Renews the lease once and claims orphans once; logs an outage."""
        began = self._clock()
        try:
            async with asyncio.timeout(self._ttl_s / 2):
                await self._store.renew_lease(self._owner)
            self._renewed(began)
            if self.may_claim:
                await self._confirm_claims()
                async with asyncio.timeout(self._ttl_s):
                    orphans = await self._store.list_orphans()
                await self._claim(orphans)
        except (StoreUnavailable, TimeoutError) as error:
            self._failed(error)

    async def _run(self) -> None:
        while not self._closing.is_set():
            began = self._clock()
            await self.renew_and_claim()
            await wait_for_event(self._closing, max(0.0, began + self._ttl_s / RENEWALS_PER_TTL - self._clock()))

    def _renewed(self, began: float) -> None:
        late, is_first = began >= self._held_until, self._held_until == 0.0
        self._held_until = began + self._ttl_s
        if self._healthy_since is None or late:
            self._healthy_since = self._clock()
        if late and not is_first:
            _log.warning("call_lease_expired", owner=self._owner)
            self._on_expired()

    def _failed(self, error: Exception) -> None:
        if self._healthy_since is not None:
            _log.warning("call_lease_renewal_failed", owner=self._owner, reason=str(error) or type(error).__name__)
        self._healthy_since = None

    async def _claim(self, orphans: list[CallRecord]) -> None:
        """Claims one call after another while the lease is held."""
        for call in orphans:
            if not self.held:
                return
            self._unconfirmed[call.id] = call
            async with asyncio.timeout(self._ttl_s):
                claimed = await self._store.claim_call(call.id, call.epoch, self._owner)
            if claimed is not None:
                await self._on_granted(call, claimed)

    async def _confirm_claims(self) -> None:
        """Reads calls whose claim was not confirmed: the store may have granted it and lost the answer.

        Without this, our own lease would keep other routers from the call for ever.
        """
        for id, call in list(self._unconfirmed.items()):
            async with asyncio.timeout(self._ttl_s):
                now = await self._store.get_call(id)
            if now is not None and now.status is CallStatus.OPEN and now.owner == self._owner:
                await self._on_granted(call, now)
            elif now is None or now.status is not CallStatus.OPEN or now.owner != call.owner:
                del self._unconfirmed[id]

    async def _on_granted(self, before: CallRecord, claimed: CallRecord) -> None:
        del self._unconfirmed[claimed.id]
        _log.info("call_claimed", call_id=claimed.id, previous_owner=before.owner, epoch=claimed.epoch)
        await self._deliver(claimed)

    async def _deliver(self, call: CallRecord) -> None:
        try:
            await self._on_claimed(call)
        except Exception:  # the root of the taken-over call
            _log.exception("takeover_start_failed", call_id=call.id)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
