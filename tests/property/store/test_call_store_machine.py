"""Any series of operations on calls, owners and journals: Redis and its scripts answer like memory."""

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
from baton.domain.ids import AttemptId, Ballot, OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason
from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.redis.redis_store import RedisStore
from baton.store.store import NO_BALLOT, CallRecord, CallStatus, JournalEntry, RecordLost, SequenceRecord, StateStore
from simulation.nodes.lua_store import LuaStore
from tests.redis_server import running_redis

OPTIONS = StoreOptions(retention_s=60.0, owner_ttl_s=60.0, timeout_s=10.0, max_orphans=2)
CALLS = st.sampled_from([RequestId("c0"), RequestId("c1"), RequestId("c2")])
SEQUENCES = st.sampled_from([RequestId("j0"), RequestId("j1")])
OWNERS = st.sampled_from([OwnerId("r0/a"), OwnerId("r1/b")])
TAGS = st.sampled_from([0, 1, 2**32 - 1])
BALLOTS = st.tuples(st.integers(1, 4), TAGS)
ATTEMPTS = st.sampled_from([1, 2, 3, 999, 1000, 1001, 1002, 3001])


def new_call(id: RequestId, owner: OwnerId, ballot: Ballot, sequences: list[RequestId]) -> CallRecord:
    epoch, tag = ballot
    return CallRecord(id, owner, epoch, CallStatus.OPEN, "/x", b"\x00{}", "", 5, 7, tuple(sequences), owner_tag=tag)


class TwoStores(RuleBasedStateMachine):
    """Two stores with equal inputs must give equal answers, errors included."""

    def __init__(self, first: StateStore) -> None:
        super().__init__()
        self.stores: tuple[StateStore, StateStore] = (first, MemoryStore(OPTIONS))
        self.runner = asyncio.Runner()

    def teardown(self) -> None:
        for store in self.stores:
            self.runner.run(store.close())
        self.runner.close()

    def same(self, call: Callable[[StateStore], Awaitable[object]]) -> None:
        async def outcome(store: StateStore) -> object:
            try:
                return await call(store)
            except (Broken, RecordLost, Superseded) as error:
                return type(error), str(error), getattr(error, "seen", None)

        redis, memory = (self.runner.run(outcome(store)) for store in self.stores)
        assert redis == memory

    @rule(id=CALLS, owner=OWNERS, ballot=BALLOTS, sequences=st.lists(SEQUENCES, unique=True, max_size=2))
    def put_call(self, id: RequestId, owner: OwnerId, ballot: Ballot, sequences: list[RequestId]) -> None:
        record = new_call(id, owner, ballot, sequences)
        self.same(lambda store: store.put_call(record))
        self.same(lambda store: store.get_call(id))

    @rule(id=CALLS, ballot=BALLOTS, status=st.sampled_from([CallStatus.ABANDONED, CallStatus.ENDED]))
    def end_call(self, id: RequestId, ballot: Ballot, status: CallStatus) -> None:
        self.same(lambda store: store.end_call(id, ballot, status))
        self.same(lambda store: store.get_call(id))

    @rule(id=CALLS, ballot=BALLOTS, owner=OWNERS, floor=st.sampled_from([0, 0, 3, 9]), seeded=st.booleans())
    def claim_call(self, id: RequestId, ballot: Ballot, owner: OwnerId, floor: int, seeded: bool) -> None:
        seed = new_call(id, owner, ballot, [RequestId("j0")]) if seeded else None
        self.same(lambda store: store.claim_call(id, ballot, owner, floor=floor, seed=seed))
        self.same(lambda store: store.claim_call(id, NO_BALLOT, owner, floor=floor, seed=seed))
        self.look_at_both()

    @rule(id=CALLS, owner=OWNERS)
    def claim_as_found(self, id: RequestId, owner: OwnerId) -> None:
        found = self.runner.run(self.stores[-1].get_call(id))
        ballot = found.ballot if found else NO_BALLOT
        self.same(lambda store: store.claim_call(id, ballot, owner))
        self.look_at_both()

    @rule(owner=OWNERS, lives=st.booleans(), number=st.integers(1, 5))
    def lease(self, owner: OwnerId, lives: bool, number: int) -> None:
        async def held(store: StateStore) -> int:
            return (await store.hold_lease(owner, number)).number  # generations are random

        self.same(held if lives else lambda store: store.release_lease(owner))
        self.same(lambda store: store.list_orphans())

    @rule(id=SEQUENCES)
    def create(self, id: RequestId) -> None:
        self.same(lambda store: store.create(SequenceRecord(id, 1, RequestState.RECEIVED, "r0", "m", 3)))

    @rule(
        id=SEQUENCES,
        attempt=ATTEMPTS,
        tag=TAGS,
        event=st.sampled_from([RequestEvent.ENQUEUE, RequestEvent.CANCEL, RequestEvent.RETRY]),
    )
    def advance(self, id: RequestId, attempt: int, tag: int, event: RequestEvent) -> None:
        self.same(lambda store: store.advance(AttemptId(id, attempt, tag), event))
        self.look(id)

    @rule(
        id=SEQUENCES, attempt=ATTEMPTS, tag=TAGS, state=st.sampled_from(RequestState),
        router=st.sampled_from(["r0", "r1"]), num_emitted=st.integers(0, 3),
    )  # fmt: skip
    def put_request(
        self, id: RequestId, attempt: int, tag: int, state: RequestState, router: str, num_emitted: int
    ) -> None:
        record = SequenceRecord(id, attempt, state, router, "m", 3, num_emitted, owner_tag=tag)
        self.same(lambda store: store.put_request(record))
        self.look(id)

    @rule(
        entries=st.lists(
            st.tuples(
                SEQUENCES,
                ATTEMPTS,
                TAGS,
                st.integers(0, 6),
                st.integers(0, 4),
                st.sampled_from(["", "", "stop", "lost"]),
            ),
            max_size=4,
        )
    )
    def write_journal(self, entries: list[tuple[RequestId, int, int, int, int, str]]) -> None:
        written = [
            JournalEntry(
                AttemptId(id, attempt, tag),
                start if num_tokens else 0,
                tuple(range(10 * attempt + start, 10 * attempt + start + num_tokens)),
                num_cached_tokens=attempt,
                finish=FinishReason.STOP if end == "stop" else None,
                failure_code="lost" if end == "lost" else "",
            )
            for id, attempt, tag, start, num_tokens, end in entries
        ]
        self.same(lambda store: store.write_journal(written))
        for sequence in ("j0", "j1"):
            for start in range(12):
                self.read(RequestId(sequence), start)
        self.look_at_both()

    def read(self, id: RequestId, start: int) -> None:
        self.same(lambda store: store.read_journal(id, start, 0.0))

    def look_at_both(self) -> None:
        for sequence in ("j0", "j1"):
            self.look(RequestId(sequence))

    def look(self, id: RequestId) -> None:
        self.same(lambda store: store.get(id))


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRedis]:
    with running_redis() as server:
        yield server


def test_redis_answers_like_memory(server: LocalRedis) -> None:
    class RedisAndMemory(TwoStores):
        def __init__(self) -> None:
            super().__init__(RedisStore(server.url, replace(OPTIONS, prefix=f"test:{uuid.uuid4().hex}:")))

    run_state_machine_as_test(RedisAndMemory, settings=settings(max_examples=10, stateful_step_count=30, deadline=None))


def test_the_scripts_answer_like_memory() -> None:
    class ScriptsAndMemory(TwoStores):
        def __init__(self) -> None:
            super().__init__(LuaStore(OPTIONS))

    run_state_machine_as_test(
        ScriptsAndMemory, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
