"""Brings the stored record of one sequence to its desired state.

`StoreWriter` runs syncs, one at a time; a sync knows nothing of queues, outages or time. A sequence's end is written
only after its journal, so that a reader that finds it ended finds all of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.domain.errors import Superseded
from baton.domain.ids import AttemptId
from baton.domain.lifecycle import TERMINAL
from baton.store import transitions
from baton.store.store import JournalEntry, SequenceRecord, SequenceStore
from baton.store.write_behind.call_sync import CallSync
from baton.store.write_behind.journal_buffer import MAX_ENTRY_TOKENS, JournalBuffer
from baton.store.write_behind.planned_write import PlannedWrite
from baton.store.write_behind.sync_status import SyncPhase, SyncStatus
from baton.store.write_chain import AdvanceSequence, PutSequence, WriteJournal, WriteResult

_WRITE, _HOLD, _JOURNAL, _DONE = SyncPhase  # reading a member of an enum takes as long as a call


@dataclass(slots=True, eq=False)
class RecordSync:
    """`stored` is the record that the store has, as far as known; `last_live` the last one before the end.

    `ended`: no change follows. `superseded_reported`: the router knows that another one has taken the sequence over.
    `was_written`: the store has had its end; only a store that was rolled back needs it again.
    """

    desired: SequenceRecord
    stored: SequenceRecord | None = None
    ended: bool = False
    was_written: bool = False
    last_live: SequenceRecord | None = None
    call: CallSync | None = None
    journal: JournalBuffer = field(default_factory=JournalBuffer)
    status: SyncStatus = field(default_factory=SyncStatus)
    superseded_reported: bool = False

    @property
    def phase(self) -> SyncPhase:
        """Its next step; a given-up record has none but to close its journal.

        The fingerprint of an attempt's workers is written at once: its tokens may reach the client before the journal.
        """
        stored, status, is_due = self.stored, self.status, self.journal.due
        if not status.given_up:
            if status.stale or status.refused:  # `alone`: this runs for every change of a request
                return _WRITE
            target = self.last_live if is_due and self.last_live is not None else self.desired
            if (
                stored is None
                or stored.state is not target.state  # `_same_state`, without the call
                or stored.attempt != target.attempt
                or stored.owner_tag != target.owner_tag
            ):
                known = "" if stored is None else stored.fingerprint
                return _HOLD if target.fingerprint in ("", known) else _WRITE
        return _JOURNAL if is_due else _DONE

    def update(self, desired: SequenceRecord) -> None:
        """Sets the record that the store is to have."""
        if desired.state in TERMINAL:
            self.last_live, self.ended = self.desired, True
        self.desired = desired

    async def run(self, store: SequenceStore) -> None:
        """Reads the stored record if need be, then applies all missing events in one step; look at `phase` afterwards.

        A record that is missing, or older than events lead, is put as a whole. `desired` may change meanwhile: this run
        uses the one after the read, which is no older than what the read may put. Raises `Superseded` for a sequence of
        another owner, `RecordLost` and `Broken` for a record that was changed meanwhile, and `StoreUnavailable`.
        """
        stored = await self._read(store) if self.status.stale else self.stored
        if stored is None and self.was_written:
            self._forget()
            return
        if self.ended and stored is not None and _same_state(stored, self.desired):
            self.journal.mark_end_stored()
        planned = self._next_write(stored, self._target)
        if planned is not None and isinstance(write := planned.write, AdvanceSequence):
            changes = {"failure_code": write.failure_code, "fingerprint": write.fingerprint}
            await store.advance(write.attempt, *write.events, num_emitted=write.num_emitted, **changes)
            self.stored = planned.after
        elif planned is not None:
            await self._put(store)
        self.status.stale = False

    def plan(self, *, call_stored: bool) -> tuple[list[PlannedWrite], bool]:
        """The due writes in order, and whether nothing is left after them. Not for a sync that is written alone.

        `call_stored`: the store has the call, so tokens may be written.
        """
        writes: list[PlannedWrite] = []
        if self.status.given_up:
            return writes, not self.journal.due
        stored = self.stored
        if stored is None or not (self.journal.due and call_stored and self._ends_from(stored)):
            stored = self._add_write(writes, stored, self._target)
        if self.journal.due:
            if not call_stored:
                return writes, False
            entry = self.journal.next_entry(stored.attempt_id, MAX_ENTRY_TOKENS)
            writes.append(PlannedWrite(WriteJournal((entry,)), self))
            if not self.journal.covers(entry):
                return writes, False
            self._add_write(writes, stored, self.desired)
        return writes, True

    def _ends_from(self, stored: SequenceRecord) -> bool:
        """True if the journal may be written under `stored`, and then events lead from there to the end at once."""
        desired = self.desired
        if not self.ended or desired.fingerprint not in ("", stored.fingerprint):
            return False
        return stored.attempt == desired.attempt and _same_owner(stored, desired)

    def _add_write(
        self, writes: list[PlannedWrite], stored: SequenceRecord | None, target: SequenceRecord
    ) -> SequenceRecord:
        """Appends what leads to `target`; returns the record that the store has then."""
        if stored is not None and _same_state(stored, target):
            return stored
        planned = self._next_write(stored, target)
        if planned is not None:
            writes.append(planned)
        return (planned and planned.after) or stored or target

    def _next_write(self, stored: SequenceRecord | None, target: SequenceRecord) -> PlannedWrite | None:
        """What leads from the stored record to `target` in one step: events, or else the whole record."""
        events = None
        if stored is not None and _same_owner(stored, target):
            events = transitions.shortest_path(stored.state, target.state, target.attempt - stored.attempt)
        if stored is None or events is None:
            return PlannedWrite(PutSequence(target), self, target)
        if not events:
            return None
        after = target
        if stored.num_emitted > target.num_emitted or (stored.fingerprint and not target.fingerprint):
            after = replace(
                target,
                num_emitted=max(stored.num_emitted, target.num_emitted),
                fingerprint=target.fingerprint or stored.fingerprint,
            )
        opened = transitions.NUM_ATTEMPTS_OPENED[events[0]]
        first = AttemptId(stored.id, stored.attempt + opened, stored.owner_tag)
        news = target.fingerprint if target.fingerprint != stored.fingerprint else ""
        write = AdvanceSequence(first, events, target.num_emitted, target.failure_code, news)
        return PlannedWrite(write, self, after)

    def take(self, planned: PlannedWrite, result: WriteResult) -> None:
        """Takes note of a record write that was accepted."""
        self.stored = result.record or planned.after

    def _forget(self) -> None:
        """The store has lost a sequence whose answer is complete: nobody needs it, until a later state is restored."""
        self.stored, self.status.stale = self.desired, False
        self.journal.mark_end_stored()

    def next_entry(self, max_tokens: int) -> JournalEntry | None:
        """The next journal entry, under the stored attempt.

        None while it may not be written: the store lacks the record, the call, or the fingerprint of the workers that
        made the tokens.
        """
        stored, desired, call = self.stored, self.desired, self.call
        if stored is None or self.status.stale or (call is not None and (call.stored is None or call.status.stale)):
            return None
        if desired.fingerprint not in ("", stored.fingerprint) and not _same_state(stored, desired):
            return None
        return self.journal.next_entry(stored.attempt_id, max_tokens)

    def mark_reset(self) -> None:
        """The store may have lost the record and its journal. A live record is put again without a read."""
        if not self.ended:
            self.stored = None
        self.status.stale = self.ended
        if self.journal.first == 0:
            self.journal.rewind()

    def rewind(self) -> None:
        """Writes the journal again, or closes it if its first tokens are not known here."""
        journal = self.journal
        if (journal.num_written or journal.end_written) and not journal.rewind():
            journal.close()

    @property
    def _target(self) -> SequenceRecord:
        return self.last_live if self.last_live is not None and self.journal.due else self.desired

    async def _read(self, store: SequenceStore) -> SequenceRecord | None:
        """Reads the stored record. If it was lost, or an older one restored, its journal is written again."""
        known, desired = self.stored, self.desired
        found = self.stored = await store.get(desired.id)
        if known is not None and (found is None or _leads_to(found, known)):
            self.rewind()
        if found is not None:
            self._check_owner(found, desired)
        return found

    async def _put(self, store: SequenceStore) -> None:
        desired = self._target
        found = await store.put_request(desired)
        self._check_owner(found, desired)
        if not _same_state(found, desired):
            raise Superseded(f"request {desired.id} has ended: {found.state.value}", found.attempt_id)
        self.stored = found

    @staticmethod
    def _check_owner(found: SequenceRecord, desired: SequenceRecord) -> None:
        """Raises `Superseded` for a record of another owner that is not older.

        An owner tag is one process's. The first owner of a call has none: its name decides.
        """
        newer = found.attempt_id.order > desired.attempt_id.order
        same = found.attempt_id == desired.attempt_id
        others = same and not desired.owner_tag and found.router_id != desired.router_id
        if newer or others:
            message = f"request {desired.id} is at attempt {found.attempt} of router {found.router_id}"
            raise Superseded(message, found.attempt_id)


def _same_state(one: SequenceRecord, other: SequenceRecord) -> bool:
    """True if two records of one sequence are in the same state of the same attempt."""
    return one.state is other.state and one.attempt == other.attempt and one.owner_tag == other.owner_tag


def _same_owner(one: SequenceRecord, other: SequenceRecord) -> bool:
    """False also for a record that only a journal write has raised to the ballot: it has the earlier router's name."""
    if one.owner_tag != other.owner_tag or one.router_id != other.router_id:
        return False
    return one.attempt == other.attempt or one.attempt_id.epoch == other.attempt_id.epoch


def _leads_to(earlier: SequenceRecord, later: SequenceRecord) -> bool:
    """True if events, or a claim, can make `later` of `earlier`."""
    if earlier.attempt_id.ballot != later.attempt_id.ballot:
        return earlier.attempt_id.order < later.attempt_id.order
    return bool(transitions.shortest_path(earlier.state, later.state, later.attempt - earlier.attempt))
