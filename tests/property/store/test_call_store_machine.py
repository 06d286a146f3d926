"""Any series of operations on calls, owners and journals: Redis answers like memory."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.redis.redis_store import RedisStore
from baton.store.store import CallRecord, CallStatus, JournalEntry, SequenceRecord, StateStore
from services.cli.processes.local_redis import LocalRedis
from tests.redis_server import running_redis

OPTIONS = StoreOptions(retention_s=60.0, owner_ttl_s=60.0, timeout_s=10.0, max_orphans=2)
CALLS = st.sampled_from([RequestId("c0"), RequestId("c1"), RequestId("c2")])
SEQUENCES = st.sampled_from([RequestId("j0"), RequestId("j1")])
OWNERS = st.sampled_from([OwnerId("r0/a"), OwnerId("r1/b")])
EPOCHS = st.integers(1, 4)
ATTEMPTS = st.integers(1, 3)


class RedisAndMemory(RuleBasedStateMachine):
    """Two stores with equal inputs must give equal answers, errors included."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        prefix = f"test:{uuid.uuid4().hex}:"
        self.stores: tuple[StateStore, StateStore] = (
            RedisStore(self.url, replace(OPTIONS, prefix=prefix)),
            MemoryStore(OPTIONS),
        )
        self.runner = asyncio.Runner()

    def teardown(self) -> None:
        for store in self.stores:
            self.runner.run(store.close())
        self.runner.close()

    def same(self, call: Callable[[StateStore], Awaitable[object]]) -> None:
        async def outcome(store: StateStore) -> object:
            try:
                return await call(store)
            except (Broken, Superseded) as error:
                return type(error)

        redis, memory = (self.runner.run(outcome(store)) for store in self.stores)
        assert redis == memory

    @rule(id=CALLS, owner=OWNERS, epoch=EPOCHS, sequences=st.lists(SEQUENCES, unique=True, max_size=2))
    def open_call(self, id: RequestId, owner: OwnerId, epoch: int, sequences: list[RequestId]) -> None:
        record = CallRecord(id, owner, epoch, CallStatus.OPEN, "/x", b"\x00{}", "", 5, 7, tuple(sequences))
        self.same(lambda store: store.open_call(record))

    @rule(id=CALLS, epoch=EPOCHS, status=st.sampled_from([CallStatus.ABANDONED, CallStatus.ENDED]))
    def end_call(self, id: RequestId, epoch: int, status: CallStatus) -> None:
        self.same(lambda store: store.end_call(id, epoch, status))
        self.same(lambda store: store.get_call(id))

    @rule(id=CALLS, epoch=EPOCHS, owner=OWNERS)
    def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> None:
        self.same(lambda store: store.claim_call(id, epoch, owner))
        for sequence in ("j0", "j1"):
            self.look(RequestId(sequence))

    @rule(owner=OWNERS, lives=st.booleans())
    def lease(self, owner: OwnerId, lives: bool) -> None:
        self.same(lambda store: store.renew_lease(owner) if lives else store.release_lease(owner))
        self.same(lambda store: store.list_orphans())

    @rule(id=SEQUENCES)
    def create(self, id: RequestId) -> None:
        self.same(lambda store: store.create(SequenceRecord(id, 1, RequestState.RECEIVED, "r0", "m", 3)))

    @rule(id=SEQUENCES, attempt=ATTEMPTS, event=st.sampled_from([RequestEvent.ENQUEUE, RequestEvent.CANCEL]))
    def advance(self, id: RequestId, attempt: int, event: RequestEvent) -> None:
        self.same(lambda store: store.advance(AttemptId(id, attempt), event))
        self.look(id)

    @rule(
        entries=st.lists(
            st.tuples(
                SEQUENCES, ATTEMPTS, st.integers(0, 6), st.integers(0, 4), st.sampled_from(["", "", "stop", "lost"])
            ),
            max_size=4,
        )
    )
    def write_journal(self, entries: list[tuple[RequestId, int, int, int, str]]) -> None:
        written = [
            JournalEntry(
                AttemptId(id, attempt),
                start,
                tuple(range(10 * attempt + start, 10 * attempt + start + num_tokens)),
                num_cached_tokens=attempt,
                finish=FinishReason.STOP if end == "stop" else None,
                failure_code="lost" if end == "lost" else "",
            )
            for id, attempt, start, num_tokens, end in entries
        ]
        self.same(lambda store: store.write_journal(written))
        for sequence in ("j0", "j1"):
            for start in range(12):
                self.read(RequestId(sequence), start)

    def read(self, id: RequestId, start: int) -> None:
        self.same(lambda store: store.read_journal(id, start, 0.0))

    def look(self, id: RequestId) -> None:
        self.same(lambda store: store.get(id))


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRedis]:
    with running_redis() as server:
        yield server


def test_redis_answers_like_memory(server: LocalRedis) -> None:
    class OnServer(RedisAndMemory):
        url = server.url

    run_state_machine_as_test(OnServer, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))
