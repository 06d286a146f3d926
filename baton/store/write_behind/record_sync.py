"""Brings the stored record of one sequence to its desired state.

`StoreWriter` runs syncs, one at a time; a sync knows nothing of queues, outages or time. A sequence's end is written
only after its journal, so that a reader that finds it ended finds all of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId
from baton.domain.lifecycle import RequestState
from baton.store import transitions
from baton.store.store import JournalEntry, SequenceRecord, SequenceStore
from baton.store.write_behind.call_sync import CallSync
from baton.store.write_behind.journal_buffer import JournalBuffer
from baton.store.write_behind.sync_status import SyncPhase, SyncStatus


@dataclass(slots=True, eq=False)
class RecordSync:
    """`stored` is the record that the store has, as far as known; `last_live` the last one before the end.

    `ended`: no change follows. `superseded_reported`: the router knows that another one has taken the sequence over.
    """

    desired: SequenceRecord
    stored: SequenceRecord | None = None
    ended: bool = False
    last_live: SequenceRecord | None = None
    call: CallSync | None = None
    journal: JournalBuffer = field(default_factory=JournalBuffer)
    status: SyncStatus = field(default_factory=SyncStatus)
    superseded_reported: bool = False

    @property
    def phase(self) -> SyncPhase:
        """Its next step; a given-up record has none but to close its journal."""
        stored, target = self.stored, self._target
        same = stored is not None and (stored.state, stored.attempt) == (target.state, target.attempt)
        if not self.status.given_up and (self.status.stale or not same):
            return SyncPhase.WRITE
        return SyncPhase.JOURNAL if self.journal.due else SyncPhase.DONE

    def update(self, desired: SequenceRecord) -> None:
        """Sets the record that the store is to have."""
        if desired.state.terminal:
            self.last_live, self.ended = self.desired, True
        self.desired = desired

    async def run(self, store: SequenceStore) -> None:
        """Reads the stored record if need be, then applies all missing events in one step; look at `phase` afterwards.

        `desired` may change meanwhile: this run uses the one after the read, which is no older than what the read may
        create. Raises `Superseded` or `Broken` for a record that cannot get there, and `StoreUnavailable`.
        """
        stored = await self._ensure_stored(store)
        desired = self._target
        events = transitions.shortest_path(stored.state, desired.state, desired.attempt - stored.attempt)
        if events is None:
            before, after = f"{stored.state.value}/{stored.attempt}", f"{desired.state.value}/{desired.attempt}"
            raise Superseded(f"no way from {before} to {after}")
        if events:
            await store.advance(
                AttemptId(desired.id, stored.attempt + transitions.NUM_ATTEMPTS_OPENED[events[0]]),
                *events,
                num_emitted=desired.num_emitted,
                failure_code=desired.failure_code,
                fingerprint=desired.fingerprint if desired.fingerprint != stored.fingerprint else "",
            )
            num_emitted = max(stored.num_emitted, desired.num_emitted)
            fingerprint = desired.fingerprint or stored.fingerprint
            self.stored = replace(desired, num_emitted=num_emitted, fingerprint=fingerprint)

    def next_entry(self, max_tokens: int) -> JournalEntry | None:
        """The next journal entry, under the stored attempt.

        None while it may not be written: the store lacks the record, the call, or the fingerprint of the workers that
        made the tokens.
        """
        stored, desired, call = self.stored, self.desired, self.call
        if stored is None or self.status.stale or (call is not None and (call.stored is None or call.status.stale)):
            return None
        same = (stored.state, stored.attempt) == (desired.state, desired.attempt)
        if desired.fingerprint not in ("", stored.fingerprint) and not same:
            return None
        return self.journal.next_entry(AttemptId(desired.id, stored.attempt), max_tokens)

    @property
    def _target(self) -> SequenceRecord:
        return self.last_live if self.last_live is not None and self.journal.due else self.desired

    async def _ensure_stored(self, store: SequenceStore) -> SequenceRecord:
        """Returns the stored record. Creates a lost one under the desired attempt; its journal is lost, too."""
        desired = self.desired
        if self.status.stale:
            self.stored = await store.get(desired.id)
        if self.stored is None:
            journal = self.journal
            if (journal.num_written or journal.end_written) and not journal.rewind():
                journal.close()  # its first tokens are not known here
            first = replace(self.desired, state=RequestState.RECEIVED, num_emitted=0, failure_code="")
            self.stored = first if await store.create(first) else await store.get(first.id)
        if self.stored is None:
            raise Broken(f"request {desired.id} vanished between two calls")
        if self.stored.router_id != desired.router_id:
            raise Superseded(f"the id belongs to router {self.stored.router_id}")
        self.status.stale = False
        return self.stored
