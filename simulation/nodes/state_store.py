"""The state store: its process, and access to it over a link that may fail.

An operation whose answer is lost has happened all the same, as with Redis. One whose request is lost may happen
after it was given up: the request is in a kernel, or on its way. Changes are noticed by polling within a heartbeat,
which is all that the contract guarantees once messages can be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar, cast

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId, Ballot, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord
from baton.store.media.media_file_store import PutOutcome
from baton.store.media.memory_media_file_store import MemoryMediaFileStore
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
from simulation.checks.checked_store import CheckedStore
from simulation.nodes.store_snapshot import Snapshot, restore, take_snapshot
from simulation.runtime.network import SimNetwork
from simulation.runtime.process import SimProcess
from simulation.scenario import STORE

TIMEOUT_S = 1.0

Reply = TypeVar("Reply")


class StoreServer:
    """The process of the store. `wiped_at_s`: when it last lost data. `rolled_back_at_s`: when it last got old ones."""

    def __init__(self, make: Callable[[], StateStore]) -> None:
        self._make = make
        self.store = make()
        self.files = self._make_files()
        """Files of images. A roll back keeps them: they are what they were, or missing."""
        self.wiped_at_s = 0.0
        self.rolled_back_at_s = 0.0

    async def wipe(self) -> None:
        """Kills the process; its successor starts empty."""
        lost, self.store = self.store, self._make()
        self.files = self._make_files()
        self.wiped_at_s = asyncio.get_running_loop().time()
        await lost.close()

    def empty(self) -> None:
        """Loses all data while its connections stay."""
        self._restore(take_snapshot(self._make()))
        self.files = self._make_files()

    def snapshot(self) -> Snapshot:
        """Returns a copy of its data, for `roll_back`."""
        return take_snapshot(self.store)

    def roll_back(self, snapshot: Snapshot) -> None:
        """Replaces its data by an earlier copy, as a Redis that loads an old file."""
        self.rolled_back_at_s = asyncio.get_running_loop().time()
        self._restore(snapshot)

    @staticmethod
    def _make_files() -> MemoryMediaFileStore:
        return MemoryMediaFileStore(clock=asyncio.get_running_loop().time)

    def _restore(self, snapshot: Snapshot) -> None:
        self.wiped_at_s = asyncio.get_running_loop().time()
        restore(self.store, snapshot)
        cast(CheckedStore, self.store).on_data_lost()


class SimStore:
    """A `StateStore` over the network."""

    def __init__(self, host: StoreServer, network: SimNetwork, process: SimProcess, heartbeat_s: float) -> None:
        self._host = host
        self._network = network
        self._link = network.link(process.name, STORE)
        self._process = process
        self._heartbeat_s = heartbeat_s
        self._late_runs: set[asyncio.Task[None]] = set()

    async def create(self, record: SequenceRecord) -> bool:
        return await self._write("create", lambda store: store.create(record))

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        return await self._write(
            "advance",
            lambda store: store.advance(
                id, *events, num_emitted=num_emitted, failure_code=failure_code, fingerprint=fingerprint
            ),
        )

    async def put_request(self, record: SequenceRecord) -> SequenceRecord:
        return await self._write("put_request", lambda store: store.put_request(record))

    async def get(self, id: RequestId) -> SequenceRecord | None:
        return await self._call(lambda store: store.get(id))

    async def put_call(self, record: CallRecord) -> CallOwner:
        return await self._write("put_call", lambda store: store.put_call(record))

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        return await self._write("end_call", lambda store: store.end_call(id, ballot, status, trace, ended_sequences))

    async def get_call(self, id: RequestId) -> CallRecord | None:
        return await self._call(lambda store: store.get_call(id))

    async def claim_call(
        self, id: RequestId, ballot: Ballot, owner: OwnerId, *, floor: int = 0, seed: CallRecord | None = None
    ) -> CallRecord | None:
        return await self._write(
            "claim_call", lambda store: store.claim_call(id, ballot, owner, floor=floor, seed=seed)
        )

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        return await self._write("hold_lease", lambda store: store.hold_lease(owner, number))

    async def release_lease(self, owner: OwnerId) -> None:
        await self._write("release_lease", lambda store: store.release_lease(owner))

    async def list_orphans(self) -> list[CallRecord]:
        return await self._call(lambda store: store.list_orphans())

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        return await self._write("write_journal", lambda store: store.write_journal(entries))

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        return await self._write("write_chains", lambda store: store.write_chains(chains))

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        return await self._call(lambda store: store.read_journal(id, start, wait_s))

    async def announce(self, record: WorkerRecord) -> bool:
        return await self._write("announce", lambda store: store.announce(record))

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        await self._write("withdraw", lambda store: store.withdraw(id, incarnation))

    async def workers(self) -> list[WorkerRecord]:
        return await self._call(lambda store: store.workers())

    async def changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await asyncio.sleep(self._process.rng.uniform(0.2, 1.0) * self._heartbeat_s)

    async def ping(self) -> None:
        await self._call(lambda store: store.ping())

    async def durability(self) -> Durability:
        return await self._call(lambda store: store.durability())

    async def close(self) -> None:
        """Does nothing: the shared store stays open."""

    async def _call(self, operation: Callable[[StateStore], Awaitable[Reply]]) -> Reply:
        return await self.ask(lambda: operation(self._host.store))

    async def _write(self, name: str, operation: Callable[[StateStore], Awaitable[Reply]]) -> Reply:
        """The same for an operation that changes the store, which may run it after it was given up."""
        store = self._host.store
        return await self.ask(
            lambda: operation(self._host.store), lambda at: self._straggle(name, lambda: operation(store), store, at)
        )

    async def ask(
        self, operation: Callable[[], Awaitable[Reply]], on_lost: Callable[[float | None], None] = lambda at: None
    ) -> Reply:
        """Runs an operation in the store's process. Raises `StoreUnavailable`.

        `on_lost` is called when its request is given up, with the time at which that would have arrived; None for one
        whose connection broke.
        """
        await self._transmit(self._process.name, on_lost)
        answer = await operation()
        await self._transmit(STORE)
        return answer

    async def _transmit(self, sender: str, on_lost: Callable[[float | None], None] = lambda at: None) -> None:
        """Waits for a message's delay; raises `StoreUnavailable` for one that is lost or late."""
        now = asyncio.get_running_loop().time()
        at = self._link.arrival(sender, now)
        late = at is None or at - now > TIMEOUT_S
        await asyncio.sleep(TIMEOUT_S if at is None or late else at - now)
        if late:
            on_lost(at)
            raise StoreUnavailable("the store did not answer in time")

    def _straggle(
        self, name: str, operation: Callable[[], Awaitable[object]], store: StateStore, held_until_s: float | None
    ) -> None:
        """Some requests that were given up arrive later, if their link and the process of `store` last."""
        loop = asyncio.get_running_loop()
        at = self._link.straggler_arrival(held_until_s, loop.time())
        if at is not None:
            loop.call_at(at, self._run_late, name, operation, store, context=contextvars.Context())

    def _run_late(self, name: str, operation: Callable[[], Awaitable[object]], store: StateStore) -> None:
        loop = asyncio.get_running_loop()
        if self._host.store is not store or self._link.is_cut(self._process.name, loop.time()):
            return

        async def run() -> None:
            with contextlib.suppress(BatonError):  # the answer goes nowhere
                await operation()

        self._network.trace.note(self._process.name, f"{name} arrives at the store, late")
        self._late_runs.add(task := loop.create_task(run(), name=f"late-{name}"))
        task.add_done_callback(self._ran_late)

    def _ran_late(self, task: asyncio.Task[None]) -> None:
        self._late_runs.discard(task)
        if not task.cancelled():
            task.result()


class SimMediaFiles:
    """A `MediaFileStore` over the network of `store`."""

    def __init__(self, host: StoreServer, store: SimStore) -> None:
        self._host = host
        self._store = store

    async def put(self, tenant: str, identity: bytes, data: bytes) -> PutOutcome:
        return await self._store.ask(lambda: self._host.files.put(tenant, identity, data))

    async def get(self, tenant: str, identity: bytes) -> bytes | None:
        return await self._store.ask(lambda: self._host.files.get(tenant, identity))

    async def holds(self, tenant: str, identities: Sequence[bytes]) -> bool:
        return await self._store.ask(lambda: self._host.files.holds(tenant, identities))

    async def discard(self, tenant: str, identity: bytes) -> None:
        await self._store.ask(lambda: self._host.files.discard(tenant, identity))

    async def close(self) -> None:
        """Does nothing: the shared files stay."""
