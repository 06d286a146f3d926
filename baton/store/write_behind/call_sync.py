"""Brings the stored record of one call to its desired status.

A call is opened before its sequences are written, and ended after them. `StoreWriter` runs it as it runs the syncs of
sequences; a sync knows nothing of queues, outages or time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.domain.errors import Superseded
from baton.domain.ids import AttemptId, OwnerId, RequestId, first_attempt
from baton.store.store import CallRecord, CallStatus, CallStore, LiveSequence, RecordLost
from baton.store.timed_event import TimedEvent
from baton.store.write_behind.planned_write import PlannedWrite
from baton.store.write_behind.sync_status import SyncPhase, SyncStatus
from baton.store.write_chain import EndCall, PutCall, WriteResult

_WRITE, _HOLD, _JOURNAL, _DONE = SyncPhase  # reading a member of an enum takes as long as a call
_OPEN = CallStatus.OPEN

NOBODY = OwnerId("nobody/0")
"""An owner without a lease."""


def changed_call(record: CallRecord, status: CallStatus, trace: bytes, body: bytes) -> CallRecord:
    """`record` with another status, trace and body. Not by `replace`, which takes three times as long."""
    return CallRecord(
        record.id, record.owner, record.epoch, status, record.endpoint, body, record.tenant, record.created_s,
        record.seed, record.sequence_ids, trace, record.owner_tag, record.private, record.text_digest,
        record.prompt_digest,
    )  # fmt: skip


class LostClaim(Exception):
    """The store has lost the claim of a call that has ended here: its next owner ends it again."""


class SequenceSync(Protocol):
    """The sync of one of the call's sequences."""

    status: SyncStatus

    @property
    def phase(self) -> SyncPhase:
        """Its next step."""
        ...

    def plan(self, *, call_stored: bool) -> tuple[list[PlannedWrite], bool]:
        """See `RecordSync`."""
        ...


@dataclass(slots=True, eq=False)
class CallSync:
    """`stored` is the status that the store has under our epoch, as far as known; None: it has no such call.

    `durable` is set for good once the store has had the call. `was_written`: the store has had its end; only a store
    that was rolled back needs it again.
    """

    desired: CallRecord
    stored: CallStatus | None = None
    ended: bool = False
    was_written: bool = False
    sequences: dict[RequestId, SequenceSync] = field(default_factory=dict)
    status: SyncStatus = field(default_factory=SyncStatus)
    durable: TimedEvent = field(default_factory=TimedEvent)

    @property
    def phase(self) -> SyncPhase:
        """Its next step. None for a call that ended before it was stored and before any of its sequences began.

        The end waits for the next journals, which its sequences mostly need.
        """
        status, desired = self.status, self.desired.status
        if status.given_up:
            return _DONE
        if status.stale or status.refused or (self.stored is None and not self._never_began):
            return _WRITE
        target = self._target if self.ended else desired  # an open call's is open
        if target is not _OPEN and self.stored is not target and not self._never_began:
            return _HOLD
        return _DONE if target is desired else _JOURNAL

    def mark_reset(self) -> None:
        """The store may have lost the call, or its end."""
        if self.was_written:
            self.stored = CallStatus.OPEN
        else:
            self.status.stale = True

    async def run(self, store: CallStore) -> None:
        """Puts the call if need be, then ends it if it is over; look at `phase` afterwards.

        Does not put a call whose end was written: its body is gone.

        Raises `Superseded` for a call of another owner, `RecordLost` also when the store has lost the end of one of its
        sequences, `LostClaim` if that end is not known here, and `StoreUnavailable`.
        """
        if self.was_written and self.status.stale:
            self.stored = CallStatus.OPEN
        elif self.stored is None or self.status.stale:
            self.stored = await self._put(store)
        self.status.stale = False
        self.durable.set()
        desired, target = self.desired, self._target
        if target is not CallStatus.OPEN and self.stored is not target:
            try:
                end = self._end_write(target)
                found = await store.end_call(end.id, end.ballot, target, end.trace, end.ended_sequences)
            except LiveSequence as live:
                if live.sequence_id in self.sequences:
                    raise
                await self._hand_on(store)
                raise LostClaim(str(live)) from live
            if not found and not self.was_written:
                raise RecordLost(f"call {desired.id} has vanished, or another router has claimed it")
            self.stored = target

    def plan(self) -> list[PlannedWrite]:
        """The due writes of the call and its sequences, in order. Skips sequences that are written alone."""
        writes: list[PlannedWrite] = []
        if self._never_began:
            return writes
        if self.stored is None:
            writes.append(PlannedWrite(PutCall(self._open_record), self))
        complete = True
        for sequence in self.sequences.values():
            if sequence.status.alone:
                complete = False
            else:
                due, is_last = sequence.plan(call_stored=True)
                writes += due
                complete = complete and is_last
        if self.ended and complete and self.stored is not self.desired.status:
            writes.append(PlannedWrite(self._end_write(self.desired.status), self))
        return writes

    def take(self, planned: PlannedWrite, result: WriteResult) -> None:
        """Takes note of a write of the call that was accepted."""
        if result.owner is not None:
            self.stored = result.owner.status
            self.durable.set()
        elif isinstance(planned.write, EndCall):
            self.stored = planned.write.status

    @property
    def _open_record(self) -> CallRecord:
        """The call before its end."""
        desired = self.desired
        return desired if desired.status is CallStatus.OPEN else replace(desired, status=CallStatus.OPEN)

    @property
    def _never_began(self) -> bool:
        """It ended before it was stored, and before any of its sequences began."""
        return self.ended and self.stored is None and not self.sequences and bool(self.desired.sequence_ids)

    def _end_write(self, status: CallStatus) -> EndCall:
        desired = self.desired
        return EndCall(desired.id, desired.ballot, status, desired.trace, tuple(self._ended_sequences))

    @property
    def _target(self) -> CallStatus:
        """A call does not end before its sequences are written."""
        for sequence in self.sequences.values():
            if sequence.phase is not _DONE:
                return _OPEN
        return self.desired.status

    @property
    def _ended_sequences(self) -> list[RequestId]:
        """Those that were written to their end here, or had ended before this owner claimed the call.

        An abandoned call may have others, which wait for its client.
        """
        ended = dict.fromkeys(self.desired.sequence_ids if self.desired.status is CallStatus.ENDED else self.sequences)
        for id, sequence in self.sequences.items():
            if sequence.status.given_up:
                ended.pop(id, None)
        return list(ended)

    async def _hand_on(self, store: CallStore) -> None:
        """Makes the call an orphan if it is ours: its next owner computes what was lost.

        The store has a sequence as live that had ended before this owner claimed the call, so nobody here has a copy.
        """
        found = await store.get_call(self.desired.id)
        if found is not None and found.status is CallStatus.OPEN and found.owner == self.desired.owner:
            await store.claim_call(found.id, found.ballot, NOBODY)

    async def _put(self, store: CallStore) -> CallStatus:
        """Enters the call unless the store has it. Returns its stored status."""
        desired = self.desired
        found = await store.put_call(self._open_record)
        if found.ballot != desired.ballot:  # a tombstone of ours has no owner
            epoch, owner_tag = found.ballot
            seen = AttemptId(desired.id, first_attempt(epoch), owner_tag)
            raise Superseded(f"call {desired.id} belongs to {found.owner}, epoch {epoch}", seen)
        return found.status
