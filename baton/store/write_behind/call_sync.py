"""Brings the stored record of one call to its desired status.

A call is opened before the tokens of its sequences are written, and ended after them. `StoreWriter` runs it as it runs
the syncs of sequences; a sync knows nothing of queues, outages or time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import RequestId
from baton.store.store import CallRecord, CallStatus, CallStore
from baton.store.write_behind.journal_buffer import JournalBuffer
from baton.store.write_behind.sync_status import SyncPhase, SyncStatus


@dataclass(slots=True, eq=False)
class CallSync:
    """`stored` is the status that the store has under our epoch, as far as known; None: it has no such call.

    `durable` is set for good once the store has had the call.
    """

    desired: CallRecord
    stored: CallStatus | None = None
    ended: bool = False
    journals: dict[RequestId, JournalBuffer] = field(default_factory=dict)
    status: SyncStatus = field(default_factory=SyncStatus)
    durable: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def phase(self) -> SyncPhase:
        """Its next step. None for a call that ended before it was stored and before any of its sequences began."""
        status, target = self.status, self._target
        if status.given_up:
            return SyncPhase.DONE
        never_began = self.ended and self.stored is None and not self.journals and bool(self.desired.sequence_ids)
        if status.stale or (self.stored is not target and not never_began):
            return SyncPhase.WRITE
        return SyncPhase.DONE if target is self.desired.status else SyncPhase.JOURNAL

    async def run(self, store: CallStore) -> None:
        """Opens the call if need be, then ends it if it is over; look at `phase` afterwards.

        Raises `Superseded` or `Broken` for a call that cannot get there, and `StoreUnavailable`.
        """
        if self.stored is None and await store.open_call(replace(self.desired, status=CallStatus.OPEN)):
            self.stored = CallStatus.OPEN
        elif self.stored is None or self.status.stale:
            self.stored = await self._read_status(store)
        self.status.stale = False
        self.durable.set()
        desired, target = self.desired, self._target
        if target is not CallStatus.OPEN and self.stored is not target:
            if not await store.end_call(desired.id, desired.epoch, target, desired.trace):
                raise Broken(f"call {desired.id} has vanished, or another router has claimed it")
            self.stored = target

    @property
    def _target(self) -> CallStatus:
        """A call does not end before its tokens are written."""
        for journal in self.journals.values():
            if journal.due:
                return CallStatus.OPEN
        return self.desired.status

    async def _read_status(self, store: CallStore) -> CallStatus:
        desired, found = self.desired, await store.get_call(self.desired.id)
        if found is None:
            self.stored = None
            raise Broken(f"call {desired.id} has vanished")
        if (found.owner, found.epoch) != (desired.owner, desired.epoch):
            raise Superseded(f"call {desired.id} belongs to {found.owner}, epoch {found.epoch}")
        return found.status
