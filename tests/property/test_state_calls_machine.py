"""Any sequence of calls on calls, owners and journals: Redis answers like memory."""

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
from baton.domain.request import FinishReason, OutputToken
from baton.state.base import CallRecord, CallStatus, JournalEntry, RequestRecord, StateBook
from baton.state.embedded import EmbeddedRedis
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from baton.state.redis_book import RedisBook
from tests.redis_server import running_redis

OPTIONS = BookOptions(retention_s=60.0, owner_ttl_s=60.0, timeout_s=10.0, max_orphans=2)
CALLS = st.sampled_from([RequestId("c0"), RequestId("c1"), RequestId("c2")])
JOBS = st.sampled_from([RequestId("j0"), RequestId("j1")])
OWNERS = st.sampled_from([OwnerId("r0/a"), OwnerId("r1/b")])
EPOCHS = st.integers(1, 4)
ATTEMPTS = st.integers(1, 3)


class RedisAndMemory(RuleBasedStateMachine):
    """Two books that are told the same must answer the same, errors included."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        prefix = f"test:{uuid.uuid4().hex}:"
        self.books: tuple[StateBook, StateBook] = (
            RedisBook(self.url, replace(OPTIONS, prefix=prefix)),
            MemoryBook(OPTIONS),
        )
        self.runner = asyncio.Runner()

    def teardown(self) -> None:
        for book in self.books:
            self.runner.run(book.close())
        self.runner.close()

    def same(self, call: Callable[[StateBook], Awaitable[object]]) -> None:
        async def outcome(book: StateBook) -> object:
            try:
                return await call(book)
            except (Broken, Superseded) as error:
                return type(error)

        redis, memory = (self.runner.run(outcome(book)) for book in self.books)
        assert redis == memory

    @rule(id=CALLS, owner=OWNERS, epoch=EPOCHS, jobs=st.lists(JOBS, unique=True, max_size=2))
    def open_call(self, id: RequestId, owner: OwnerId, epoch: int, jobs: list[RequestId]) -> None:
        record = CallRecord(id, owner, epoch, CallStatus.OPEN, "/x", b"\x00{}", "", 5, 7, tuple(jobs))
        self.same(lambda book: book.open_call(record))

    @rule(id=CALLS, epoch=EPOCHS, status=st.sampled_from([CallStatus.ABANDONED, CallStatus.ENDED]))
    def end_call(self, id: RequestId, epoch: int, status: CallStatus) -> None:
        self.same(lambda book: book.end_call(id, epoch, status))
        self.same(lambda book: book.get_call(id))

    @rule(id=CALLS, epoch=EPOCHS, owner=OWNERS)
    def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> None:
        self.same(lambda book: book.claim_call(id, epoch, owner))
        for job in ("j0", "j1"):
            self.look(RequestId(job))

    @rule(owner=OWNERS, lives=st.booleans())
    def lease(self, owner: OwnerId, lives: bool) -> None:
        self.same(lambda book: book.hold(owner) if lives else book.let_go(owner))
        self.same(lambda book: book.orphans())

    @rule(id=JOBS)
    def create(self, id: RequestId) -> None:
        self.same(lambda book: book.create(RequestRecord(id, 1, RequestState.RECEIVED, "r0", "m", 3)))

    @rule(id=JOBS, attempt=ATTEMPTS, event=st.sampled_from([RequestEvent.ENQUEUE, RequestEvent.CANCEL]))
    def advance(self, id: RequestId, attempt: int, event: RequestEvent) -> None:
        self.same(lambda book: book.advance(AttemptId(id, attempt), event))
        self.look(id)

    @rule(
        entries=st.lists(
            st.tuples(JOBS, ATTEMPTS, st.integers(0, 6), st.integers(0, 4), st.sampled_from(["", "", "stop", "lost"])),
            max_size=4,
        )
    )
    def write_journal(self, entries: list[tuple[RequestId, int, int, int, str]]) -> None:
        written = [
            JournalEntry(
                AttemptId(id, attempt),
                tuple(OutputToken(index, 10 * attempt + index) for index in range(start, start + num_tokens)),
                num_cached_tokens=attempt,
                finish=FinishReason.STOP if end == "stop" else None,
                failure_code="lost" if end == "lost" else "",
            )
            for id, attempt, start, num_tokens, end in entries
        ]
        self.same(lambda book: book.write_journal(written))
        for job in ("j0", "j1"):
            for start in range(12):
                self.read(RequestId(job), start)

    def read(self, id: RequestId, start: int) -> None:
        self.same(lambda book: book.read_journal(id, start, 0.0))

    def look(self, id: RequestId) -> None:
        self.same(lambda book: book.get(id))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with running_redis() as server:
        yield server


def test_redis_answers_like_memory(server: EmbeddedRedis) -> None:
    class OnServer(RedisAndMemory):
        url = server.url

    run_state_machine_as_test(OnServer, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))
