"""Failures found by the simulation, each in its smallest form."""

from dataclasses import replace

from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.store import transitions
from baton.store.memory_store import MemoryStore
from baton.store.store import JournalEntry, SequenceRecord
from baton.store.write_behind.record_sync import RecordSync
from baton.store.write_behind.sync_status import SyncPhase, SyncStatus

NAME = RequestId("r")


class _SlowToAnswer(MemoryStore):
    """While the state of a request is read, the request fails once more and is retried."""

    def __init__(self) -> None:
        super().__init__()
        self.sync: RecordSync | None = None

    async def get(self, id: RequestId) -> SequenceRecord | None:
        sync, self.sync = self.sync, None
        if sync is not None:
            for event in (RequestEvent.RESERVE, RequestEvent.INTERRUPT, RequestEvent.RETRY):
                due = AttemptId(NAME, sync.desired.attempt + transitions.NUM_ATTEMPTS_OPENED[event])
                sync.desired = transitions.apply_event(sync.desired, due, event)
        return await super().get(id)


async def test_a_sequence_that_advances_during_a_store_read_is_still_written():
    """The record was created under the newer attempt and then mistaken for another owner's."""
    store = _SlowToAnswer()
    sync = RecordSync(SequenceRecord(NAME, 1, RequestState.QUEUED, "router-0", "m", 3), status=SyncStatus(stale=True))
    store.sync = sync
    await sync.run(store)
    assert not sync.status.given_up
    record = await store.get(NAME)
    assert record is not None
    assert (record.state, record.attempt) == (RequestState.QUEUED, 2)


async def test_an_end_is_written_over_a_record_that_only_a_journal_raised():
    """Seed 900298: the store was rolled back to before a claim, and the journal's write came first.

    The record had the claim's ballot, and the earlier router's name and state: its end was taken for another one's.
    """
    store = MemoryStore()
    await store.put_request(SequenceRecord(NAME, 1, RequestState.DECODING, "router-0", "m", 3))
    claimed = SequenceRecord(NAME, 1001, RequestState.QUEUED, "router-1", "m", 3, owner_tag=6)
    sync = RecordSync(claimed, stored=claimed)
    sync.update(replace(claimed, state=RequestState.FINISHED))
    sync.status.stale = True
    await store.write_journal([JournalEntry(claimed.attempt_id, 0, (1, 2))])
    await sync.run(store)
    assert await store.get(NAME) == sync.desired
    assert sync.phase is SyncPhase.DONE
