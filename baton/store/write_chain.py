"""Writes that a store runs in one round trip, in chains: a write runs only if the one before it was accepted.

Every write follows the rules of the operation that it names. Made by `baton.store.write_behind`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, Ballot, RequestId
from baton.domain.lifecycle import RequestEvent
from baton.store.store import (
    CallOwner,
    CallRecord,
    CallStatus,
    CallStore,
    JournalEntry,
    RecordLost,
    SequenceRecord,
    SequenceStore,
    StateStore,
    WriteOutcome,
)


class PutCall(msgspec.Struct, frozen=True):
    """`CallStore.put_call`. Accepted if the call is the owner's afterwards. Result: the `CallOwner`."""

    record: CallRecord

    @property
    def id(self) -> RequestId:
        """Id of the call."""
        return self.record.id

    async def run(self, store: CallStore) -> WriteResult:
        owner = await store.put_call(self.record)
        return WriteResult(owner.ballot == self.record.ballot, owner=owner)


class PutSequence(msgspec.Struct, frozen=True):
    """`SequenceStore.put_request`. Accepted if the store has `record` afterwards. Result: the record that it has."""

    record: SequenceRecord

    @property
    def id(self) -> RequestId:
        """Id of the sequence."""
        return self.record.id

    async def run(self, store: SequenceStore) -> WriteResult:
        found, given = await store.put_request(self.record), self.record
        same = found.attempt_id == given.attempt_id and found.state is given.state
        others = not given.owner_tag and found.router_id != given.router_id
        return WriteResult(same and not others, record=found)


class AdvanceSequence(msgspec.Struct, frozen=True):
    """`SequenceStore.advance`. Accepted if it applies; one that would raise is not."""

    attempt: AttemptId
    events: tuple[RequestEvent, ...]
    num_emitted: int = 0
    failure_code: str = ""
    fingerprint: str = ""

    @property
    def id(self) -> RequestId:
        """Id of the sequence."""
        return self.attempt.request_id

    async def run(self, store: SequenceStore) -> WriteResult:
        changes = {"failure_code": self.failure_code, "fingerprint": self.fingerprint}
        try:
            await store.advance(self.attempt, *self.events, num_emitted=self.num_emitted, **changes)
        except (Superseded, RecordLost, Broken):
            return WriteResult(False)
        return WriteResult(True)


class WriteJournal(msgspec.Struct, frozen=True):
    """`CallStore.write_journal`. Accepted if every entry is DONE. Result: the outcomes. `entries` is not empty."""

    entries: tuple[JournalEntry, ...]

    @property
    def id(self) -> RequestId:
        """Id of the first sequence."""
        return self.entries[0].id.request_id

    async def run(self, store: CallStore) -> WriteResult:
        outcomes = tuple(await store.write_journal(self.entries))
        return WriteResult(all(outcome is WriteOutcome.DONE for outcome in outcomes), outcomes=outcomes)


class EndCall(msgspec.Struct, frozen=True):
    """`CallStore.end_call`. Accepted if it has an effect; one that would raise `LiveSequence` is not."""

    id: RequestId
    ballot: Ballot
    status: CallStatus
    trace: bytes = b""
    ended_sequences: tuple[RequestId, ...] = ()

    async def run(self, store: CallStore) -> WriteResult:
        try:
            done = await store.end_call(self.id, self.ballot, self.status, self.trace, self.ended_sequences)
        except RecordLost:
            done = False
        return WriteResult(done)


ChainedWrite = PutCall | PutSequence | AdvanceSequence | WriteJournal | EndCall


class WriteResult(msgspec.Struct, frozen=True):
    """Result of a write that ran. A refused one had no effect, but for the entries of a journal that are DONE."""

    accepted: bool
    owner: CallOwner | None = None
    record: SequenceRecord | None = None
    outcomes: tuple[WriteOutcome, ...] = ()


async def run_chain(store: StateStore, chain: Sequence[ChainedWrite]) -> list[WriteResult]:
    """Runs a chain by the single operations of `store`: several round trips. Returns the results of those that ran.

    Raises `StoreUnavailable`; the writes before it have taken effect.
    """
    results: list[WriteResult] = []
    for write in chain:
        results.append(await write.run(store))
        if not results[-1].accepted:
            break
    return results
