"""Any series of operations: memory answers like a plain model, and Redis answers like memory."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.lifecycle import TABLE, RequestEvent, RequestState
from baton.domain.worker import WorkerRecord, WorkerRole, WorkerStatus
from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.redis.redis_store import RedisStore
from baton.store.store import RecordLost, SequenceRecord, WorkerIdInUse
from tests.redis_server import running_redis

OPTIONS = StoreOptions(retention_s=60.0, worker_ttl_s=20.0, timeout_s=10.0)
REQUEST_IDS = st.sampled_from([RequestId("a"), RequestId("b")])
WORKER_IDS = st.sampled_from([WorkerId("v"), WorkerId("w")])
INCARNATIONS = st.sampled_from([Incarnation(2**62), Incarnation(2**62 + 1), Incarnation(2**62 + 2)])
OPENING = (RequestEvent.RETRY, RequestEvent.RESUME)  # events that come with the next attempt
T = TypeVar("T")


def new_request(id: RequestId, attempt: int = 1) -> SequenceRecord:
    return SequenceRecord(id, attempt, RequestState.RECEIVED, "router", "tiny", num_prompt_tokens=3)


def new_worker(id: WorkerId, incarnation: Incarnation, status: WorkerStatus) -> WorkerRecord:
    return WorkerRecord(id, WorkerRole.DECODE, incarnation, "host:1", "tiny", "f00d", 16, 512, 100, status)


@dataclass
class FakeClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Model:
    """The simplest store: lists that only grow; the last line counts."""

    clock: FakeClock
    requests: dict[RequestId, list[tuple[float, SequenceRecord]]] = field(default_factory=dict)
    arrivals: dict[WorkerId, list[tuple[float, Incarnation]]] = field(default_factory=dict)
    announced: dict[WorkerId, tuple[float, WorkerRecord]] = field(default_factory=dict)

    async def get(self, id: RequestId) -> SequenceRecord | None:
        lines = self.requests.get(id)
        return lines[-1][1] if lines and self.clock() < lines[-1][0] + OPTIONS.retention_s else None

    async def create(self, record: SequenceRecord) -> bool:
        free = await self.get(record.id) is None
        if free:
            self.requests.setdefault(record.id, []).append((self.clock(), record))
        return free

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        before, attempt = list(self.requests.get(id.request_id, ())), id.attempt
        try:
            for position, event in enumerate(events):
                attempt += position > 0 and event in OPENING
                step = AttemptId(id.request_id, attempt)
                state = await self._step(step, event, num_emitted, failure_code, fingerprint)
        except (Broken, RecordLost, Superseded):
            self.requests[id.request_id] = before
            raise
        return state

    async def _step(
        self, id: AttemptId, event: RequestEvent, num_emitted: int, failure_code: str, fingerprint: str
    ) -> RequestState:
        held = await self.get(id.request_id)
        if held is None:
            raise RecordLost
        allowed = held.attempt + 1 if event in OPENING else held.attempt
        if id.attempt < allowed:
            raise Superseded("late")
        if id.attempt > allowed:
            raise RecordLost
        if (held.state, event) not in TABLE:
            raise Broken
        after = replace(
            held,
            attempt=id.attempt,
            state=TABLE[held.state, event],
            num_emitted=max(held.num_emitted, num_emitted),
            failure_code=failure_code,
            fingerprint=fingerprint or held.fingerprint,
        )
        self.requests[id.request_id].append((self.clock(), after))
        return after.state

    async def announce(self, record: WorkerRecord) -> bool:
        lines = self.arrivals.setdefault(record.id, [])
        if lines and lines[-1][0] + OPTIONS.retention_s <= self.clock():
            lines.clear()
        if record.incarnation in [seen for _, seen in lines if seen != lines[-1][1]]:
            return False
        if any(live.id == record.id and live.incarnation != record.incarnation for live in await self.workers()):
            raise WorkerIdInUse(record.id)
        lines.append((self.clock(), record.incarnation))
        self.announced[record.id] = (self.clock(), record)
        return True

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        if id in self.announced and self.announced[id][1].incarnation == incarnation:
            del self.announced[id]

    async def workers(self) -> list[WorkerRecord]:
        live = [record for at, record in self.announced.values() if self.clock() < at + OPTIONS.worker_ttl_s]
        return sorted(live, key=lambda record: record.id)

    async def close(self) -> None:
        pass


class Comparison(RuleBasedStateMachine):
    """Two stores with equal inputs must give equal answers, errors included."""

    def __init__(self, subject: Any, reference: Any, clock: FakeClock | None) -> None:
        super().__init__()
        self.subject, self.reference, self.clock = subject, reference, clock
        self.runner = asyncio.Runner()

    def teardown(self) -> None:
        self.runner.run(self.subject.close())
        self.runner.run(self.reference.close())
        self.runner.close()

    def same(self, call: Callable[[Any], Awaitable[object]]) -> None:
        async def outcome(store: Any) -> object:
            try:
                return await call(store)
            except (Broken, RecordLost, Superseded, WorkerIdInUse) as error:
                return type(error)

        assert self.runner.run(outcome(self.subject)) == self.runner.run(outcome(self.reference))

    @rule(id=REQUEST_IDS, attempt=st.integers(1, 2))
    def create(self, id: RequestId, attempt: int) -> None:
        self.same(lambda store: store.create(new_request(id, attempt)))

    @rule(
        id=REQUEST_IDS,
        attempt=st.integers(1, 4),
        event=st.sampled_from(RequestEvent),
        num_emitted=st.integers(0, 9),
        failure_code=st.sampled_from(["", "worker_lost"]),
        fingerprint=st.sampled_from(["", "old", "new"]),
    )
    def advance(
        self, id: RequestId, attempt: int, event: RequestEvent, num_emitted: int, failure_code: str, fingerprint: str
    ) -> None:
        news = {"failure_code": failure_code, "fingerprint": fingerprint}
        self.same(lambda store: store.advance(AttemptId(id, attempt), event, num_emitted=num_emitted, **news))
        self.get(id)

    @rule(id=REQUEST_IDS, data=st.data())
    def advance_rightly(self, id: RequestId, data: st.DataObject) -> None:
        held = self.runner.run(self.reference.get(id))
        steps = [event for state, event in TABLE if held is not None and state is held.state]
        if held is not None and steps:
            event = data.draw(st.sampled_from(steps))
            self.advance(id, held.attempt + (event in OPENING), event, 0, "", "")

    @rule(id=REQUEST_IDS, data=st.data())
    def walk(self, id: RequestId, data: st.DataObject) -> None:
        held = self.runner.run(self.reference.get(id))
        state, events = held.state if held is not None else RequestState.RECEIVED, list[RequestEvent]()
        for _ in range(data.draw(st.integers(1, 6))):
            steps = [event for start, event in TABLE if start is state]
            event = data.draw(st.sampled_from(steps or list(RequestEvent)) | st.sampled_from(RequestEvent))
            events.append(event)
            state = TABLE.get((state, event), state)
        attempt = (held.attempt if held is not None else 1) + (events[0] in OPENING)
        self.same(lambda store: store.advance(AttemptId(id, attempt), *events, num_emitted=len(events)))
        self.get(id)

    @rule(id=REQUEST_IDS)
    def get(self, id: RequestId) -> None:
        self.same(lambda store: store.get(id))

    @rule(id=WORKER_IDS, incarnation=INCARNATIONS, status=st.sampled_from(WorkerStatus))
    def announce(self, id: WorkerId, incarnation: Incarnation, status: WorkerStatus) -> None:
        self.same(lambda store: store.announce(new_worker(id, incarnation, status)))
        self.same(lambda store: store.workers())

    @rule(id=WORKER_IDS, incarnation=INCARNATIONS)
    def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        self.same(lambda store: store.withdraw(id, incarnation))
        self.same(lambda store: store.workers())

    @rule(passed_s=st.sampled_from([1.0, 19.0, 20.0, 59.0, 60.0]))
    def wait(self, passed_s: float) -> None:
        if self.clock is not None:  # Redis has a clock of its own
            self.clock.now += passed_s
            self.same(lambda store: store.workers())


def test_memory_answers_like_the_model() -> None:
    class MemoryAndModel(Comparison):
        def __init__(self) -> None:
            clock = FakeClock()
            super().__init__(MemoryStore(OPTIONS, clock=clock), Model(clock), clock)

    run_state_machine_as_test(MemoryAndModel, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRedis]:
    with running_redis() as server:
        yield server


def test_redis_answers_like_memory(server: LocalRedis) -> None:
    class RedisAndMemory(Comparison):
        def __init__(self) -> None:
            options = replace(OPTIONS, prefix=f"test:{uuid.uuid4().hex}:")
            super().__init__(RedisStore(server.url, options), MemoryStore(OPTIONS), None)

    run_state_machine_as_test(RedisAndMemory, settings=settings(max_examples=15, stateful_step_count=30, deadline=None))
