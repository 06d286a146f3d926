"""Keeps calls that must not be stored in the memory of this process, and passes all others on.

Redis gets neither body nor tokens nor sequences of a private call, so only its own router can resume it. Memory is
bounded: beyond it the oldest private calls that no longer run are forgotten. Created by the router's `app`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from baton.domain.ids import AttemptId, Ballot, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
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
    WriteOutcome,
)
from baton.store.write_chain import ChainedWrite, PutCall, WriteJournal, WriteResult, run_chain

MAX_PRIVATE_CALLS = 1024
MAX_PRIVATE_BYTES = 64 * 1024 * 1024
"""Most bytes of all private bodies."""


@dataclass(frozen=True, slots=True)
class _PrivateCall:
    """A private call: a store of its own, and what to forget with it."""

    store: MemoryStore
    num_bytes: int
    sequence_ids: tuple[RequestId, ...]


class PrivateStore:
    """A `StateStore` in front of another one, which it closes with itself. For one event loop."""

    def __init__(
        self,
        shared: StateStore,
        options: StoreOptions,
        *,
        max_calls: int = MAX_PRIVATE_CALLS,
        max_bytes: int = MAX_PRIVATE_BYTES,
    ) -> None:
        self._shared = shared
        self._options = options
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._calls: OrderedDict[RequestId, _PrivateCall] = OrderedDict()  # the oldest first
        self._stores: dict[RequestId, MemoryStore] = {}  # of private calls and their sequences
        self._num_bytes = 0

    async def create(self, record: SequenceRecord) -> bool:
        return await self._of(record.id).create(record)

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        news = {"failure_code": failure_code, "fingerprint": fingerprint}
        return await self._of(id.request_id).advance(id, *events, num_emitted=num_emitted, **news)

    async def put_request(self, record: SequenceRecord) -> SequenceRecord:
        return await self._of(record.id).put_request(record)

    async def get(self, id: RequestId) -> SequenceRecord | None:
        return await self._of(id).get(id)

    async def put_call(self, record: CallRecord) -> CallOwner:
        if record.private and record.id not in self._calls:
            self._add(record)
            await self._forget_oldest()
        return await self._of(record.id).put_call(record)

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        return await self._of(id).end_call(id, ballot, status, trace, ended_sequences)

    async def get_call(self, id: RequestId) -> CallRecord | None:
        return await self._of(id).get_call(id)

    async def claim_call(
        self,
        id: RequestId,
        ballot: Ballot,
        owner: OwnerId,
        *,
        floor: int = 0,
        seed: CallRecord | None = None,
    ) -> CallRecord | None:
        if seed is not None and seed.private and id not in self._calls:
            return None  # forgotten here, and never stored elsewhere
        return await self._of(id).claim_call(id, ballot, owner, floor=floor, seed=seed)

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        return await self._shared.hold_lease(owner, number)

    async def release_lease(self, owner: OwnerId) -> None:
        await self._shared.release_lease(owner)

    async def list_orphans(self) -> list[CallRecord]:
        return await self._shared.list_orphans()

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        """See `CallStore`. Private entries are written first: they do not depend on the other store."""
        if not self._stores:
            return await self._shared.write_journal(entries)
        outcomes: dict[int, WriteOutcome] = {}
        for index, entry in enumerate(entries):
            if (store := self._stores.get(entry.id.request_id)) is not None:
                outcomes[index] = (await store.write_journal([entry]))[0]
        rest = [index for index in range(len(entries)) if index not in outcomes]
        written = await self._shared.write_journal([entries[index] for index in rest]) if rest else []
        outcomes |= zip(rest, written, strict=True)
        return [outcomes[index] for index in range(len(entries))]

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        """See `StateStore`. Chains with a private write run first, by single operations."""
        private, rest = dict[int, list[WriteResult]](), list[Sequence[ChainedWrite]]()
        for index, chain in enumerate(chains):
            if self._is_private(chain):
                private[index] = await run_chain(self, chain)
            else:
                rest.append(chain)
        if not private:
            return await self._shared.write_chains(chains)
        written = iter(await self._shared.write_chains(rest) if rest else ())
        return [private[index] if index in private else next(written) for index in range(len(chains))]

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        return await self._of(id).read_journal(id, start, wait_s)

    async def announce(self, record: WorkerRecord) -> bool:
        return await self._shared.announce(record)

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        await self._shared.withdraw(id, incarnation)

    async def workers(self) -> list[WorkerRecord]:
        return await self._shared.workers()

    def changes(self) -> AsyncIterator[None]:
        return self._shared.changes()

    async def ping(self) -> None:
        await self._shared.ping()

    async def durability(self) -> Durability:
        """That of the other store; private calls have none."""
        return await self._shared.durability()

    async def close(self) -> None:
        for call in self._calls.values():
            await call.store.close()
        await self._shared.close()

    def _is_private(self, chain: Sequence[ChainedWrite]) -> bool:
        """True if a write of it must not reach the other store."""
        for write in chain:
            if isinstance(write, PutCall) and write.record.private:
                return True
            if self._stores and isinstance(write, WriteJournal):
                if any(entry.id.request_id in self._stores for entry in write.entries):
                    return True
            elif self._stores and write.id in self._stores:
                return True
        return False

    def _of(self, id: RequestId) -> StateStore:
        """The store of a call or a sequence."""
        return self._stores.get(id, self._shared)

    def _add(self, record: CallRecord) -> None:
        call = _PrivateCall(MemoryStore(self._options), len(record.body), record.sequence_ids)
        self._calls[record.id] = call
        self._stores.update(dict.fromkeys((record.id, *record.sequence_ids), call.store))
        self._num_bytes += call.num_bytes

    async def _forget_oldest(self) -> None:
        """Forgets old calls beyond the bounds, and expired ones, but none that runs."""
        newest = next(reversed(self._calls))
        for id, call in list(self._calls.items()):
            found = await call.store.get_call(id)
            full = len(self._calls) > self._max_calls or self._num_bytes > self._max_bytes
            if id == newest or (found is not None and (found.status is CallStatus.OPEN or not full)):
                if not full:
                    return
                continue
            await self._forget(id)

    async def _forget(self, id: RequestId) -> None:
        call = self._calls.pop(id)
        for name in (id, *call.sequence_ids):
            self._stores.pop(name, None)
        self._num_bytes -= call.num_bytes
        await call.store.close()
