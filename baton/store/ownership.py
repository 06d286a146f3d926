"""Renews a router's owner lease and claims the calls of owners whose lease has ended.

One task. A router claims orphaned calls only after the store has answered it for one full lease. An outage ends all
leases at once; their owners must have time to renew them. After a reset of the store, no router claims before its
patience is over: every owner finds the reset with its next renewal and puts its calls again. Lost claims, those
without an answer, are followed here until the store tells their outcome: an orphan's, and with `confirm` those of
`takeover`. Owned by the router's `app`; knows no Redis.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import structlog

from baton.domain.ids import OwnerId, RequestId
from baton.store.notifier import wait_for_event
from baton.store.store import CallRecord, CallStatus, CallStore, LeaseState, StoreUnavailable

_log = structlog.get_logger(__name__)
RENEWALS_PER_TTL = 4
"""Renewals in one lease."""

MAX_GRANTED = 10_000
"""Claimed calls whose epochs are remembered, for a store that is rolled back."""

FLUSH_S = 0.3
"""Longest usual delay between a reset that an owner finds and its calls in the store."""


class StoreReset(enum.Enum):
    """Reason to put all calls again.

    LAPSED: the lease had ended, so any call may have been claimed. EMPTIED: the store has lost everything. ROLLED_BACK:
    an older state of it was restored. RESTARTED: another server process answers, which may have older data (a replica
    that lagged) although the renewals agree.
    """

    LAPSED = "lapsed"
    EMPTIED = "emptied"
    ROLLED_BACK = "rolled_back"
    RESTARTED = "restarted"


def patience_s(owner_ttl_s: float) -> float:
    """Time after a reset of the store until every living owner has put its calls again."""
    return 2 * owner_ttl_s + FLUSH_S


def boot_time() -> float:
    """Seconds since the machine started, those of a suspension included: a stopped process sees its lease end."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(eq=False, slots=True)
class _Claim:
    """A claim whose outcome is not known. `call`: as it was before; `floor`: that of the claim.

    `until`: a lease after the store first had the call unchanged, when the request can no longer be on its way to the
    store; None before, and after each outage.
    """

    call: CallRecord
    floor: int
    on_claimed: Callable[[CallRecord], Awaitable[None]]
    until: float | None = None

    def is_granted(self, owner: OwnerId, now: CallRecord | None) -> bool:
        """True if the store has given the call to `owner`. A record of an earlier claim has no higher epoch."""
        if now is None or now.status is not CallStatus.OPEN or now.owner != owner:
            return False
        return now.epoch > max(self.call.epoch, self.floor)

    def is_refused(self, now: CallRecord | None) -> bool:
        """True if the store cannot grant it any more: a claim compares the ballot. For one that is not granted."""
        return now is not None and (now.status is CallStatus.ENDED or now.ballot > self.call.ballot)


class OwnerLease:
    """Renews the lease of `owner`, and awaits `on_claimed` with each call that it claims."""

    def __init__(
        self,
        store: CallStore,
        owner: OwnerId,
        on_claimed: Callable[[CallRecord], Awaitable[None]],
        *,
        on_reset: Callable[[StoreReset], None] = lambda reset: None,
        owner_ttl_s: float = 1.0,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """`owner_ttl_s` must equal that of `StoreOptions`.

        `on_claimed` must be quick. If it raises, the error is logged and the call stays with this owner. `on_reset` is
        called when a renewal finds a reset, and once more after the patience: all calls must be put again.
        """
        self._store = store
        self._owner = owner
        self._on_claimed = on_claimed
        self._on_reset = on_reset
        self._ttl_s = owner_ttl_s
        self._clock = clock
        self._held_until = 0.0
        self._claims_from: float | None = None  # None: the store does not answer
        self._generation = ""  # "": none known
        self._server = ""  # the same
        self._number = 0
        self._last_number = 0  # of the last renewal with an answer
        self._put_again: tuple[float, StoreReset] | None = None  # when, and why
        self._claiming = True
        self._unconfirmed: dict[RequestId, _Claim] = {}  # sent without an answer yet, or lost
        self._granted: dict[RequestId, int] = {}  # newest epoch of each call that was claimed, the oldest claims first
        self._renewed_now = asyncio.Event()  # replaced with every answer
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
        """True after good answers for one full lease, or for the patience after a reset.

        Every living owner could renew its lease and put its calls then.
        """
        return self._claiming and self._is_patient

    @property
    def _is_patient(self) -> bool:
        return self._claims_from is not None and self._clock() >= self._claims_from

    def is_claiming(self, id: RequestId) -> bool:
        """True from the claim of an orphan, or `confirm`, until the outcome is known and `on_claimed` has the call."""
        return id in self._unconfirmed

    def confirm(self, call: CallRecord, on_claimed: Callable[[CallRecord], Awaitable[None]], *, floor: int = 0) -> None:
        """Follows a claim of this owner whose answer was lost, instead of an earlier one of the call. Returns at once.

        `call`: as it was before the claim, or the seed of one that the store lacked. `floor`: that of the claim. Awaits
        `on_claimed` with the call if the store has granted the claim. The store may run it late: a call that is
        unchanged is read for one lease more. No effect once the lease is closed.
        """
        if not self._closing.is_set():
            self._unconfirmed[call.id] = _Claim(call, floor, on_claimed)

    def forget(self, id: RequestId) -> bool:
        """Follows a claim no longer: the caller claims the call again, or has it. True if one was followed."""
        return self._unconfirmed.pop(id, None) is not None

    def start(self) -> None:
        """Starts the task inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="store-ownership")

    def stop_claiming(self) -> None:
        """Keeps renewing the lease, but claims nothing more: the router ends.

        Claims under way are followed to their answer: the lease would keep others from such a call.
        """
        self._claiming = False

    async def close(self) -> None:
        """Stops the task and releases the lease, so that others can claim at once; idempotent."""
        if self._task is None or self._closing.is_set():
            return
        self._closing.set()
        self._task.cancel()
        await asyncio.wait([self._task], timeout=self._ttl_s)
        self._held_until = 0.0
        self._unconfirmed.clear()  # a call that was granted is an orphan now
        try:
            async with asyncio.timeout(self._ttl_s):
                await self._store.release_lease(self._owner)
        except (StoreUnavailable, TimeoutError):
            _log.warning("call_release_failed", owner=self._owner)

    async def wait_for_renewal(self) -> bool:
        """Waits for the answer to a renewal that is sent after this call: it finds any reset before now.

        False if there is none within a lease's time: the store does not answer, or the task does not run.
        """
        number = self._number
        try:
            async with asyncio.timeout(self._ttl_s):
                while self._last_number <= number:
                    await self._renewed_now.wait()
        except TimeoutError:
            return False
        return True

    async def renew_and_claim(self) -> None:
        """Renews the lease once and claims orphans once; logs an outage."""
        began = self._clock()
        until = began + self._ttl_s / RENEWALS_PER_TTL
        try:
            async with asyncio.timeout(self._ttl_s / 2):
                self._number += 1
                number, state = self._number, await self._store.hold_lease(self._owner, self._number)
            self._renewed(began, number, state)
            if self._is_patient:
                await self._confirm_claims(until)
            if self.may_claim:
                async with asyncio.timeout(self._ttl_s):
                    orphans = await self._store.list_orphans()
                await self._claim(orphans, until)
        except (StoreUnavailable, TimeoutError) as error:
            self._failed(error)

    async def _run(self) -> None:
        while not self._closing.is_set():
            began = self._clock()
            await self.renew_and_claim()
            await wait_for_event(self._closing, max(0.0, began + self._ttl_s / RENEWALS_PER_TTL - self._clock()))

    def _renewed(self, began: float, number: int, state: LeaseState) -> None:
        """Takes note of a renewal that was sent at `began`: a lease counts from then, since its answer may be late."""
        reset = self._find_reset(began, state)
        now, self._held_until = self._clock(), began + self._ttl_s
        self._generation, self._server, self._last_number = state.generation, state.server, number
        if reset is not None:
            _log.warning("store_reset", owner=self._owner, reason=reset.value)
            self._claims_from = now + patience_s(self._ttl_s)
            self._put_again = self._claims_from, reset
            self._on_reset(reset)
        elif self._claims_from is None:
            patient_until = self._put_again[0] if self._put_again is not None else 0.0
            self._claims_from = max(patient_until, now + self._ttl_s)
        if self._put_again is not None and now >= self._put_again[0]:
            (_, again), self._put_again = self._put_again, None
            self._on_reset(again)
        renewed, self._renewed_now = self._renewed_now, asyncio.Event()
        renewed.set()

    def _find_reset(self, began: float, state: LeaseState) -> StoreReset | None:
        if not self._generation:
            return None
        if state.generation != self._generation:
            return StoreReset.EMPTIED
        if began >= self._held_until:
            return StoreReset.LAPSED
        if state.number < self._last_number:
            return StoreReset.ROLLED_BACK
        return StoreReset.RESTARTED if state.server != self._server else None

    def _failed(self, error: Exception) -> None:
        if self._claims_from is not None:
            _log.warning("call_lease_renewal_failed", owner=self._owner, reason=str(error) or type(error).__name__)
        self._claims_from = None
        for claim in self._unconfirmed.values():
            claim.until = None

    async def _claim(self, orphans: list[CallRecord], until: float) -> None:
        """Claims one call after another while the lease is held, `until` the next renewal is due.

        A store that was rolled back to before a claim of ours shows the call as an orphan again. Its next claim gets
        another epoch: the attempts of the earlier one may be running.
        """
        for call in orphans:
            if not (self.held and self._claiming):
                return
            floor, earlier = self._granted.get(call.id, 0), self._unconfirmed.get(call.id)
            claim = self._unconfirmed[call.id] = _Claim(call, floor, self._on_claimed)
            async with asyncio.timeout(self._ttl_s):
                claimed = await self._store.claim_call(call.id, call.ballot, self._owner, floor=floor)
            if claimed is not None:
                await self._on_granted(claim, claimed)
            elif earlier is None:  # otherwise that one may have been granted
                self._settle(claim)
            if self._clock() >= until:
                return

    async def _confirm_claims(self, until: float) -> None:
        """Reads the calls of lost claims: the store may have granted one and lost the answer.

        Without this, our own lease would keep other routers from the call for ever. Ends `until` the next renewal is
        due, as many claims may be lost together; those that were not read come first then.
        """
        for id, claim in list(self._unconfirmed.items()):
            async with asyncio.timeout(self._ttl_s):
                now = await self._store.get_call(id)
            if self._unconfirmed.get(id) is claim:  # else made again meanwhile
                self._unconfirmed[id] = self._unconfirmed.pop(id)
                await self._confirm_claim(claim, now)
            if self._clock() >= until:
                return

    async def _confirm_claim(self, claim: _Claim, now: CallRecord | None) -> None:
        """`now`: the call as the store has it."""
        if now is not None and claim.is_granted(self._owner, now):
            await self._on_granted(claim, now)
        elif claim.is_refused(now):
            self._settle(claim)
        elif claim.until is None:
            claim.until = self._clock() + self._ttl_s
        elif self._clock() >= claim.until:
            _log.info("claim_not_granted", call_id=claim.call.id)
            self._settle(claim)

    async def _on_granted(self, claim: _Claim, claimed: CallRecord) -> None:
        self._granted.pop(claimed.id, None)
        self._granted[claimed.id] = claimed.epoch
        while len(self._granted) > MAX_GRANTED:
            del self._granted[next(iter(self._granted))]
        _log.info("call_claimed", call_id=claimed.id, previous_owner=claim.call.owner, epoch=claimed.epoch)
        await self._deliver(claim, claimed)
        self._settle(claim)

    def _settle(self, claim: _Claim) -> None:
        """The outcome of a claim is known. One that was made since stays."""
        if self._unconfirmed.get(claim.call.id) is claim:
            del self._unconfirmed[claim.call.id]

    async def _deliver(self, claim: _Claim, call: CallRecord) -> None:
        try:
            await claim.on_claimed(call)
        except Exception:  # the root of the taken-over call
            _log.exception("takeover_start_failed", call_id=call.id)
