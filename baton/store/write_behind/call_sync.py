"""One call's way into the store: exists before its sequences' tokens are written, ended after them.

`StoreWriter` runs it as it runs the syncs of sequences; knows nothing of queues, outages or time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import RequestId
from baton.store.store import CallRecord, CallStatus, CallStore
from baton.store.write_behind.journal_buffer import JournalBuffer
from baton.store.write_behind.sync_status import SyncStatus


@dataclass(slots=True, eq=False)
class CallSync:
    """`stored` is the status that the store has under our epoch, as far as we know; None: it has no such call.

    `durable` is set for good when the store has had the call once.
    """

    desired: CallRecord
    stored: CallStatus | None = None
    journals: dict[RequestId, JournalBuffer] = field(default_factory=dict)
    status: SyncStatus = field(default_factory=SyncStatus)
    durable: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Nothing more will be asked of it."""
        return self.desired.status is not CallStatus.OPEN

    @property
    def exists(self) -> bool:
        """The store has it."""
        return self.stored is not None and not self.status.stale

    @property
    def in_sync(self) -> bool:
        """Nothing is left to write, until the next change or until a journal is written."""
        return self.status.given_up or self._unneeded or (self.stored is self._target and not self.status.stale)

    @property
    def settled(self) -> bool:
        """Nothing is left to write, journals included."""
        return self.in_sync and (self.status.given_up or self._target is self.desired.status)

    async def run(self, store: CallStore) -> None:
        """Tries to bring the store to the desired; look at `done` afterwards. Raises `StoreUnavailable`."""
        await self.status.track(self.desired.id, self._reconcile(store))

    @property
    def _unneeded(self) -> bool:
        """It ended before any of its sequences began, and the store has never heard of it."""
        untouched = self.stored is None and not self.status.stale and not self.journals
        return self.ended and untouched and bool(self.desired.sequence_ids)

    @property
    def _target(self) -> CallStatus:
        """A call does not end before its tokens are written."""
        waits = any(journal.due for journal in self.journals.values())
        return CallStatus.OPEN if waits else self.desired.status

    async def _reconcile(self, store: CallStore) -> None:
        desired = self.desired
        if self.status.stale or self.stored is None:
            self.stored = await self._ensure_open(store)
            self.status.stale = False
        self.durable.set()
        target = self._target
        if target is not CallStatus.OPEN and self.stored is not target:
            if not await store.end_call(desired.id, desired.epoch, target):
                raise Broken(f"call {desired.id} has vanished, or somebody has claimed it")
            self.stored = target

    async def _ensure_open(self, store: CallStore) -> CallStatus:
        """The call's status in the store, which is durable there if need be."""
        desired = self.desired
        if self.stored is None and await store.open_call(replace(desired, status=CallStatus.OPEN)):
            return CallStatus.OPEN
        found = await store.get_call(desired.id)
        if found is None:
            self.stored = None
            raise Broken(f"call {desired.id} has vanished")
        if (found.owner, found.epoch) != (desired.owner, desired.epoch):
            raise Superseded(f"call {desired.id} belongs to {found.owner}, epoch {found.epoch}")
        return found.status
