"""What one round trip to the store writes. Made by `SyncQueue`, written by `Flusher`. Values only."""

from __future__ import annotations

import msgspec

from baton.store.store import JournalEntry
from baton.store.write_behind.planned_write import PlannedWrite
from baton.store.write_behind.record_sync import RecordSync


class JournalBatch(msgspec.Struct, frozen=True):
    """Entries for one round trip, each with its sync. `complete`: nothing else was due that could be written."""

    syncs: tuple[RecordSync, ...]
    entries: tuple[JournalEntry, ...]
    complete: bool


class WriteBatch(msgspec.Struct, frozen=True):
    """Chains of writes for one round trip, and journals that need no other write. `complete`: see `JournalBatch`.

    `leaves_chains`: there are more chains than a round trip takes.
    """

    chains: tuple[list[PlannedWrite], ...]
    journals: JournalBatch
    complete: bool
    leaves_chains: bool = False

    @property
    def empty(self) -> bool:
        return not (self.chains or self.journals.entries)


NO_JOURNALS = JournalBatch((), (), complete=True)
