"""State store in this process's memory, for one-process serving, tests and simulation.

Keeps the contract of `RedisStore` (`tests/contract/test_store.py`). Lifetimes run on the injected clock, in seconds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId, Ballot, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.store import transitions
from baton.store.memory_call_store import MemoryCallStore, SequenceTable
from baton.store.notifier import ChangeNotifier
from baton.store.options import StoreOptions
from baton.store.store import (
    CallOwner,
    CallRecord,
    CallStatus,
    Durability,
    JournalEntry,
    JournalPart,
    LeaseState,
    RecordLost,
    SequenceRecord,
    StoreUnavailable,
    WorkerIdInUse,
    WriteOutcome,
)
from baton.store.write_chain import ChainedWrite, WriteResult, run_chain


@dataclass(slots=True)
class _StoredWorker:
    """One worker id. `incarnations` are in order of arrival, the current one last. `record` is None once withdrawn."""

    incarnations: list[Incarnation] = field(default_factory=list)
    record: WorkerRecord | None = None
    expires_at: float = 0.0
    forget_at: float = 0.0

    def live(self, now: float) -> WorkerRecord | None:
        return self.record if now < self.expires_at else None


class MemoryStore:
    """A `StateStore` without a server. For one event loop."""

    def __init__(self, options: StoreOptions | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options or StoreOptions()
        self._clock = clock
        self._sequences = SequenceTable(self._options.retention_s, clock)
        self._calls = MemoryCallStore(self._sequences, self._options, clock)
        self._workers: dict[WorkerId, _StoredWorker] = {}
        self._notifier = ChangeNotifier(self._options.heartbeat_s)
        self._closed = False

    async def create(self, record: SequenceRecord) -> bool:
        transitions.check_new_sequence(record)
        if self._get(record.id) is not None:
            return False
        self._sequences.put(record)
        return True

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        record = self._get(id.request_id)
        if record is None:
            raise RecordLost(transitions.lost_message(id, events[0], None))
        after = transitions.apply_events(
            record, id, events, num_emitted=num_emitted, failure_code=failure_code, fingerprint=fingerprint
        )
        self._sequences.put(after)
        return after.state

    async def put_request(self, record: SequenceRecord) -> SequenceRecord:
        after = transitions.after_put(self._get(record.id), record)
        self._sequences.put(after)
        return after

    async def get(self, id: RequestId) -> SequenceRecord | None:
        return self._get(id)

    async def put_call(self, record: CallRecord) -> CallOwner:
        self._check_open()
        return self._calls.put(record)

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        self._check_open()
        return self._calls.end(id, ballot, status, trace, ended_sequences)

    async def get_call(self, id: RequestId) -> CallRecord | None:
        self._check_open()
        return self._calls.get(id)

    async def claim_call(
        self,
        id: RequestId,
        ballot: Ballot,
        owner: OwnerId,
        *,
        floor: int = 0,
        seed: CallRecord | None = None,
    ) -> CallRecord | None:
        self._check_open()
        return self._calls.claim(id, ballot, owner, floor=floor, seed=seed)

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        self._check_open()
        return self._calls.hold_lease(owner, number)

    async def release_lease(self, owner: OwnerId) -> None:
        self._check_open()
        self._calls.release_lease(owner)

    async def list_orphans(self) -> list[CallRecord]:
        self._check_open()
        return self._calls.list_orphans()

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        self._check_open()
        return self._calls.write(entries)

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        self._check_open()
        return [await run_chain(self, chain) for chain in chains]

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        self._check_open()
        part = await self._calls.read(id, start, wait_s)
        self._check_open()
        return part

    async def announce(self, record: WorkerRecord) -> bool:
        now = self._check_open()
        self._expire(now)
        stored = self._workers.setdefault(record.id, _StoredWorker())
        if record.incarnation in stored.incarnations[:-1]:
            return False
        before = stored.live(now)
        if before is not None and before.incarnation != record.incarnation:
            raise WorkerIdInUse(record.id)
        if record.incarnation not in stored.incarnations:
            stored.incarnations = [*stored.incarnations, record.incarnation][-self._options.max_incarnations :]
        stored.record, stored.expires_at = record, now + self._options.worker_ttl_s
        stored.forget_at = now + self._options.retention_s
        if before is None or _routed_by(before) != _routed_by(record):
            self._notifier.notify()
        return True

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        now = self._check_open()
        stored = self._workers.get(id)
        live = stored.live(now) if stored else None
        if stored is not None and live is not None and live.incarnation == incarnation:
            stored.record = None
            self._notifier.notify()

    async def workers(self) -> list[WorkerRecord]:
        now = self._check_open()
        live = (stored.live(now) for _, stored in sorted(self._workers.items()))
        return [record for record in live if record is not None]

    def changes(self) -> AsyncIterator[None]:
        return self._notifier.listen()

    async def ping(self) -> None:
        self._check_open()

    async def durability(self) -> Durability:
        self._check_open()
        return Durability.NONE

    async def close(self) -> None:
        self._closed = True
        self._notifier.close()
        self._calls.close()

    def _check_open(self) -> float:
        """Returns the time. Raises `StoreUnavailable` after `close`."""
        if self._closed:
            raise StoreUnavailable("this store has been closed; open another with `connect`")
        return self._clock()

    def _get(self, id: RequestId) -> SequenceRecord | None:
        self._check_open()
        return self._sequences.get(id)

    def _expire(self, now: float) -> None:
        """Drops ids without announcement for one retention, with their incarnations."""
        for id in [id for id, stored in self._workers.items() if max(stored.forget_at, stored.expires_at) <= now]:
            del self._workers[id]


def _routed_by(record: WorkerRecord) -> tuple[object, ...]:
    """What a change of a record must be told for at once; load can wait for the next heartbeat."""
    return record.incarnation, record.status, record.routing_facts
