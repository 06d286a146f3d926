"""The book in this process's memory: the in-process twin of `RedisBook`, for one-process serving, tests and simulation.

Keeps the same contract (`tests/contract/test_state.py`). Lifetimes run on the injected clock, in seconds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.state import ledger
from baton.state.base import CallRecord, CallStatus, JournalEntry, JournalPart, RequestRecord, StateUnavailable, Written
from baton.state.bell import Bell
from baton.state.memory_calls import MemoryCalls
from baton.state.options import BookOptions


@dataclass(frozen=True, slots=True)
class _KeptRequest:
    record: RequestRecord
    expires_at: float


@dataclass(slots=True)
class _KeptWorker:
    """One worker id. `incarnations` are in order of arrival: the last one reigns. `record` is None once withdrawn."""

    incarnations: list[Incarnation] = field(default_factory=list)
    record: WorkerRecord | None = None
    expires_at: float = 0.0
    forgotten_at: float = 0.0

    def live(self, now: float) -> WorkerRecord | None:
        return self.record if now < self.expires_at else None


class _Requests:
    """Request records until they expire."""

    def __init__(self, retention_s: float, clock: Callable[[], float]) -> None:
        self._retention_s = retention_s
        self._clock = clock
        self._kept: dict[RequestId, _KeptRequest] = {}  # ordered by expiry: every write moves to the end

    def find(self, id: RequestId) -> RequestRecord | None:
        kept = self._kept.get(id)
        return kept.record if kept and self._clock() < kept.expires_at else None

    def keep(self, record: RequestRecord) -> None:
        now = self._clock()
        self._kept.pop(record.id, None)
        self._kept[record.id] = _KeptRequest(record, now + self._retention_s)
        while (oldest := next(iter(self._kept.values()))).expires_at <= now:
            del self._kept[oldest.record.id]


class MemoryBook:
    """A `StateBook` without a server. One event loop; not shared between threads."""

    def __init__(self, options: BookOptions | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options or BookOptions()
        self._clock = clock
        self._requests = _Requests(self._options.retention_s, clock)
        self._calls = MemoryCalls(self._requests, self._options, clock)
        self._workers: dict[WorkerId, _KeptWorker] = {}
        self._bell = Bell(self._options.heartbeat_s)
        self._closed = False

    async def create(self, record: RequestRecord) -> bool:
        ledger.check_new(record)
        if self._find(record.id) is not None:
            return False
        self._requests.keep(record)
        return True

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        record = self._find(id.request_id)
        if record is None:
            raise Broken(f"{events[0].value} of {id}: no such request in the book")
        after = ledger.walked(
            record, id.attempt, events, num_emitted=num_emitted, failure_code=failure_code, fingerprint=fingerprint
        )
        self._requests.keep(after)
        return after.state

    async def get(self, id: RequestId) -> RequestRecord | None:
        return self._find(id)

    async def open_call(self, record: CallRecord) -> bool:
        self._check_open()
        return self._calls.open(record)

    async def end_call(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        self._check_open()
        return self._calls.end(id, epoch, status)

    async def get_call(self, id: RequestId) -> CallRecord | None:
        self._check_open()
        return self._calls.find(id)

    async def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        self._check_open()
        return self._calls.claim(id, epoch, owner)

    async def hold(self, owner: OwnerId) -> None:
        self._check_open()
        self._calls.hold(owner)

    async def let_go(self, owner: OwnerId) -> None:
        self._check_open()
        self._calls.let_go(owner)

    async def orphans(self) -> list[CallRecord]:
        self._check_open()
        return self._calls.orphans()

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[Written]:
        self._check_open()
        return self._calls.write(entries)

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        self._check_open()
        part = await self._calls.read(id, start, wait_s)
        self._check_open()
        return part

    async def announce(self, record: WorkerRecord) -> bool:
        now = self._check_open()
        self._forget(now)
        kept = self._workers.setdefault(record.id, _KeptWorker())
        if record.incarnation in kept.incarnations[:-1]:
            return False
        if record.incarnation not in kept.incarnations:
            kept.incarnations = [*kept.incarnations, record.incarnation][-self._options.max_incarnations :]
        before = kept.live(now)
        kept.record, kept.expires_at = record, now + self._options.worker_ttl_s
        kept.forgotten_at = now + self._options.retention_s
        if before is None or (before.incarnation, before.status) != (record.incarnation, record.status):
            self._bell.ring()
        return True

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        now = self._check_open()
        kept = self._workers.get(id)
        live = kept.live(now) if kept else None
        if kept is not None and live is not None and live.incarnation == incarnation:
            kept.record = None
            self._bell.ring()

    async def workers(self) -> list[WorkerRecord]:
        now = self._check_open()
        live = (kept.live(now) for _, kept in sorted(self._workers.items()))
        return [record for record in live if record is not None]

    def changes(self) -> AsyncIterator[None]:
        return self._bell.listen()

    async def ping(self) -> None:
        self._check_open()

    async def close(self) -> None:
        self._closed = True
        self._bell.close()
        self._calls.close()

    def _check_open(self) -> float:
        """The time now, if the book is open."""
        if self._closed:
            raise StateUnavailable("this book has been closed; open another with `connect`")
        return self._clock()

    def _find(self, id: RequestId) -> RequestRecord | None:
        self._check_open()
        return self._requests.find(id)

    def _forget(self, now: float) -> None:
        """Drops ids that have been silent for the retention, their incarnations included."""
        for id in [id for id, kept in self._workers.items() if max(kept.forgotten_at, kept.expires_at) <= now]:
            del self._workers[id]
