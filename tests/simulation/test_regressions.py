"""Failures found by the simulation, each in its smallest form."""

from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.store import transitions
from baton.store.memory_store import MemoryStore
from baton.store.store import SequenceRecord
from baton.store.write_behind.record_sync import RecordSync
from baton.store.write_behind.sync_status import SyncStatus

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
