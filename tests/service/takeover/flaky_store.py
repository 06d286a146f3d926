"""A state store that a test can disconnect from one of its users; the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from baton.domain.ids import AttemptId, Ballot, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.store.store import (
    CallOwner,
    CallRecord,
    CallStatus,
    Durability,
    JournalEntry,
    JournalPart,
    LeaseState,
    SequenceRecord,
    StateStore,
    StoreUnavailable,
    WriteOutcome,
)
from baton.store.write_chain import ChainedWrite, WriteResult


class PartitionedStore:
    """One user's view of a shared `StateStore`; closing the view leaves the store open.

    While `away`, every operation fails; `num_writes_refused` counts failed writes. The next `num_reads_lost` reads of a
    sequence fail. The answers to the next
    `num_claims_lost` claims are lost, but not the claims; while `claims_answered` is not set, answers to claims are
    delayed. `num_calls_read` counts reads of calls.
    """

    def __init__(self, store: StateStore) -> None:
        self.shared = store
        self.away = False
        self.num_claims_lost = 0
        self.num_reads_lost = 0
        self.num_calls_read = 0
        self.num_writes_refused = 0
        self.claims_answered = asyncio.Event()
        self.claims_answered.set()

    async def create(self, record: SequenceRecord) -> bool:
        self.num_writes_refused += self.away
        return await self._reachable().create(record)

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        news = {"failure_code": failure_code, "fingerprint": fingerprint}
        return await self._reachable().advance(id, *events, num_emitted=num_emitted, **news)

    async def put_request(self, record: SequenceRecord) -> SequenceRecord:
        self.num_writes_refused += self.away
        return await self._reachable().put_request(record)

    async def get(self, id: RequestId) -> SequenceRecord | None:
        if self.num_reads_lost > 0:
            self.num_reads_lost -= 1
            raise StoreUnavailable("the read was lost by the test")
        return await self._reachable().get(id)

    async def put_call(self, record: CallRecord) -> CallOwner:
        self.num_writes_refused += self.away
        return await self._reachable().put_call(record)

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        return await self._reachable().end_call(id, ballot, status, trace, ended_sequences)

    async def get_call(self, id: RequestId) -> CallRecord | None:
        record = await self._reachable().get_call(id)
        self.num_calls_read += 1
        return record

    async def claim_call(
        self, id: RequestId, ballot: Ballot, owner: OwnerId, *, floor: int = 0, seed: CallRecord | None = None
    ) -> CallRecord | None:
        claimed = await self._reachable().claim_call(id, ballot, owner, floor=floor, seed=seed)
        await self.claims_answered.wait()
        if self.num_claims_lost > 0:
            self.num_claims_lost -= 1
            raise StoreUnavailable("the answer was lost by the test")
        return claimed

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        return await self._reachable().hold_lease(owner, number)

    async def release_lease(self, owner: OwnerId) -> None:
        await self._reachable().release_lease(owner)

    async def list_orphans(self) -> list[CallRecord]:
        return await self._reachable().list_orphans()

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        self.num_writes_refused += self.away
        return await self._reachable().write_chains(chains)

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        return await self._reachable().write_journal(entries)

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        return await self._reachable().read_journal(id, start, wait_s)

    async def announce(self, record: WorkerRecord) -> bool:
        return await self._reachable().announce(record)

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        await self._reachable().withdraw(id, incarnation)

    async def workers(self) -> list[WorkerRecord]:
        return await self._reachable().workers()

    def changes(self) -> AsyncIterator[None]:
        return self.shared.changes()

    async def ping(self) -> None:
        self.num_writes_refused += self.away
        await self._reachable().ping()

    async def durability(self) -> Durability:
        level = await self._reachable().durability()
        return Durability.RESTART if level is Durability.NONE else level  # in memory: stands for a durable server

    async def close(self) -> None:
        return

    def _reachable(self) -> StateStore:
        if self.away:
            raise StoreUnavailable("disconnected by the test")
        return self.shared
