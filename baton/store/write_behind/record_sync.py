"""One sequence's way into the store: where it has got to, what the store is stored to hold, and the steps in between.

`StoreWriter` runs syncs, one at a time; a sync knows nothing of queues, outages or time. A sequence's end is written
only after its journal, so that whoever finds it ended finds all of its tokens.
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
from baton.store.write_behind.sync_status import SyncStatus


@dataclass(slots=True, eq=False)
class RecordSync:
    """`stored` is what the store holds, as far as we know; `last_live` is where the sequence was when it ended.

    `superseded_reported`: the router has heard that somebody else carries the sequence on.
    """

    desired: SequenceRecord
    stored: SequenceRecord | None = None
    last_live: SequenceRecord | None = None
    call: CallSync | None = None
    journal: JournalBuffer = field(default_factory=JournalBuffer)
    status: SyncStatus = field(default_factory=SyncStatus)
    superseded_reported: bool = False

    @property
    def ended(self) -> bool:
        """Nothing more will be asked of it."""
        return self.desired.state.terminal

    @property
    def in_sync(self) -> bool:
        """Nothing is left to write, until the next change or until its journal is written."""
        at_target = self.stored is not None and transitions.same_state(self.stored, self._target)
        return self.status.given_up or (at_target and not self.status.stale)

    @property
    def settled(self) -> bool:
        """Nothing is left to write, the journal included."""
        return self.in_sync and not self.journal.due

    @property
    def given_up(self) -> bool:
        return self.status.given_up

    def update(self, desired: SequenceRecord) -> None:
        """The sequence has apply_event on."""
        if desired.state.terminal:
            self.last_live = self.desired
        self.desired = desired

    async def run(self, store: SequenceStore) -> None:
        """Tries to bring the store to the desired; look at `done` afterwards.

        Raises `StoreUnavailable` when the store does not answer; the sync can be run again then.
        """
        await self.status.track(self.desired.id, self._reconcile(store))

    def next_entry(self, max_tokens: int) -> JournalEntry | None:
        """What to journal next, under the attempt that the store is stored to hold; None while it may not be written:
        the store lacks the record, the call, or the fingerprint of those who made the tokens."""
        call_exists = self.call is None or self.call.exists
        if self.stored is None or self.status.stale or not call_exists or not self.journal.due:
            return None
        if self.desired.fingerprint not in ("", self.stored.fingerprint) and not transitions.same_state(
            self.stored, self.desired
        ):
            return None
        return self.journal.next_entry(AttemptId(self.desired.id, self.stored.attempt), max_tokens)

    @property
    def _target(self) -> SequenceRecord:
        return self.last_live if self.last_live is not None and self.journal.due else self.desired

    async def _reconcile(self, store: SequenceStore) -> None:
        """Reads the stored record if need be, then applies all events in one step. `desired` may change meanwhile: this
        run uses the one after the read, which is no older than what the read may create."""
        stored = await self._ensure_stored(store)
        desired = self._target
        events = transitions.shortest_path(stored, desired)
        if events is None:
            raise Superseded(
                f"no way from {stored.state.value}/{stored.attempt} to {desired.state.value}/{desired.attempt}"
            )
        if events:
            first = AttemptId(desired.id, stored.attempt + transitions.num_attempts_opened(events[0]))
            fingerprint = desired.fingerprint if desired.fingerprint != stored.fingerprint else ""
            await store.advance(
                first,
                *events,
                num_emitted=desired.num_emitted,
                failure_code=desired.failure_code,
                fingerprint=fingerprint,
            )
            self.stored = replace(
                stored,
                attempt=desired.attempt,
                state=desired.state,
                num_emitted=max(stored.num_emitted, desired.num_emitted),
                failure_code=desired.failure_code,
                fingerprint=desired.fingerprint or stored.fingerprint,
            )

    async def _ensure_stored(self, store: SequenceStore) -> SequenceRecord:
        """What the store holds now; a request that it does not know is entered, under the desired's attempt."""
        if self.status.stale:
            self.stored = await store.get(self.desired.id)
        if self.stored is None:
            first = replace(self.desired, state=RequestState.RECEIVED, num_emitted=0, failure_code="")
            self.stored = first if await store.create(first) else await store.get(first.id)
        if self.stored is None:
            raise Broken(f"request {self.desired.id} vanished between two calls")
        if self.stored.router_id != self.desired.router_id:
            raise Superseded(f"the id belongs to router {self.stored.router_id}")
        self.status.stale = False
        return self.stored
