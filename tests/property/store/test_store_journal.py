"""The stored journal converges to the written tokens: in order, no gap, no duplicate, and an end only after them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.ids import AttemptId, OwnerId, RequestId, first_attempt, owner_tag
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.store.connect import connect
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import CallRecord, CallStatus, JournalPart, SequenceRecord, StateStore
from baton.store.write_behind.flusher import WriterOptions
from baton.store.write_behind.writer import MAX_BODY_BYTES, MAX_UNWRITTEN_TOKENS, StoreWriter
from tests.property.store.faulty_store import OPTIONS, Fault, FaultyStore
from tests.redis_server import running_redis

E = RequestEvent
TO_DECODING = (E.ENQUEUE, E.RESERVE, E.DECODE)
OURS, THEIRS = OwnerId("router/1"), OwnerId("other/1")


def new_call(*sequences: str, body: bytes = b"{}") -> CallRecord:
    ids = tuple(RequestId(sequence) for sequence in sequences)
    return CallRecord(RequestId("c"), OURS, 1, CallStatus.OPEN, "/v1/completions", body, "", 17, 5, ids)


def new_writer(
    store: FaultyStore, on_superseded: Callable[[AttemptId], None] = lambda id: None, **options: float
) -> StoreWriter:
    fast = WriterOptions(**{"retry_s": 0.001, "journal_interval_s": 0.001, **options})  # type: ignore[arg-type]
    return StoreWriter(cast(StateStore, store), fast, on_superseded=on_superseded)


def token(index: int) -> OutputToken:
    return OutputToken(index, 1000 + index, TokenLogprobs(-0.5 * index) if index % 3 == 0 else None)


@dataclass
class SequenceDriver:
    """Drives one sequence as its router does, and knows the journal that the store must end up with."""

    writer: StoreWriter
    id: RequestId
    attempt: int = 1
    owner_tag: int = 0
    emitted: list[OutputToken] = field(default_factory=list)
    finish: FinishReason | None = None
    decoding: bool = False

    def begin(self) -> None:
        self.writer.create(SequenceRecord(self.id, 1, RequestState.RECEIVED, "router", "tiny", num_prompt_tokens=3))
        self.writer.advance(self._id, E.ENQUEUE)

    def decode(self) -> None:
        for event in (E.RESERVE, E.DECODE):
            self.writer.advance(self._id, event)
        self.decoding = True

    def emit(self, num_tokens: int, *, again: int = 0) -> None:
        """`again`: number of tokens that are written once more."""
        start = len(self.emitted)
        self.emitted += [token(index) for index in range(start, start + num_tokens)]
        self.writer.write_tokens(self._id, self.emitted[max(0, start - again) :], num_cached_tokens=2)

    def retry(self) -> None:
        self.writer.advance(self._id, E.INTERRUPT, failure_code="worker_lost")
        self.attempt += 1
        self.writer.advance(self._id, E.RETRY)
        self.decoding = False

    def end(self) -> None:
        self.finish = FinishReason.STOP
        self.writer.write_tokens(self._id, (), num_cached_tokens=2, finish=self.finish)
        self.writer.advance(self._id, E.FINISH, num_emitted=len(self.emitted))

    @property
    def _id(self) -> AttemptId:
        return AttemptId(self.id, self.attempt, self.owner_tag)


FAULTS = st.lists(st.sampled_from([Fault.NONE, Fault.NOT_RECEIVED, Fault.ANSWER_LOST]), max_size=20)
EMIT = st.tuples(st.integers(0, 1), st.sampled_from(["emit", "emit", "emit", "retry", "end"]), st.integers(0, 5))


@given(script=st.lists(st.none() | EMIT, max_size=40), faults=FAULTS, losses=st.lists(st.integers(0, 20), max_size=3))
@settings(max_examples=150, deadline=None)
def test_the_journal_converges_to_what_was_written(
    script: list[tuple[int, str, int] | None], faults: list[Fault], losses: list[int]
) -> None:
    for position in losses:
        faults.insert(position, Fault.RECORDS_LOST)
    asyncio.run(_run_script(script, faults))


async def _run_script(script: list[tuple[int, str, int] | None], faults: list[Fault]) -> None:
    """Two sequences of one call; between the steps, some store operations of the writer pass.

    What was settled when the server lost everything stays lost; live sequences are checked again, and restored.
    """
    store = FaultyStore(faults, shut=True)
    async with asyncio.timeout(30), new_writer(store) as writer:
        writer.open_call(new_call("a", "b"))
        sequences = [SequenceDriver(writer, RequestId(name)) for name in "ab"]
        for sequence in sequences:
            sequence.begin()
        for step in script:
            if step is None:
                if writer.num_pending:
                    await store.release_one()
                    await _look(store, sequences)
            else:
                _act(sequences[step[0]], step[1], step[2])
        store.open()
        await writer.flush(timeout_s=20)
        store.faults.clear()
        for sequence in sequences:
            if sequence.finish is None:
                sequence.emit(1)  # the next token of a live sequence finds out what was lost
        assert await writer.flush(timeout_s=20) == 0
        for sequence in sequences:
            await check(store, sequence, may_forget=Fault.RECORDS_LOST in faults)
    assert not writer.degraded


async def _look(store: FaultyStore, sequences: list[SequenceDriver]) -> None:
    """A reader sees a prefix of the emitted tokens while the writer works, and all tokens of an ended sequence."""
    for sequence in sequences:
        part, record = await _seen(store, sequence)
        assert list(part.tokens) == sequence.emitted[: len(part.tokens)]
        if record is not None and record.state is RequestState.FINISHED:
            assert (list(part.tokens), part.finish) == (sequence.emitted, sequence.finish)


def _act(sequence: SequenceDriver, what: str, number: int) -> None:
    if sequence.finish is not None:
        return
    if not sequence.decoding:
        sequence.decode()
    match what:
        case "emit":
            sequence.emit(number, again=number // 2)
        case "retry":
            sequence.retry()
        case _:
            sequence.end()


async def _seen(store: FaultyStore, sequence: SequenceDriver) -> tuple[JournalPart, SequenceRecord | None]:
    return await store.inner.read_journal(sequence.id, 0, 0.0), await store.inner.get(sequence.id)


async def check(store: FaultyStore, sequence: SequenceDriver, *, may_forget: bool) -> None:
    part, record = await _seen(store, sequence)
    if record is None and sequence.finish is not None and may_forget:
        return
    assert (list(part.tokens), part.finish) == (sequence.emitted, sequence.finish)
    assert record is not None
    assert (record.attempt, record.state.terminal) == (sequence.attempt, sequence.finish is not None)


async def test_tokens_of_all_sequences_are_written_in_one_round_trip() -> None:
    store = FaultyStore()
    async with asyncio.timeout(10), new_writer(store) as writer:
        writer.open_call(new_call(*(f"j{number}" for number in range(50))))
        sequences = [SequenceDriver(writer, RequestId(f"j{number}")) for number in range(50)]
        for sequence in sequences:
            sequence.begin()
        assert await writer.flush(10) == 0
        num_calls = store.num_calls
        for sequence in sequences:
            sequence.emit(3)
        assert await writer.flush(10) == 0
        assert store.num_calls == num_calls + 1
        for sequence in sequences:
            await check(store, sequence, may_forget=False)


async def test_a_call_and_its_sequences_end_after_their_tokens() -> None:
    store = FaultyStore()
    async with asyncio.timeout(10), new_writer(store, journal_interval_s=3600.0) as writer:
        sequence = await decoding(store, writer)
        sequence.emit(1)
        assert await writer.flush(10) == 0  # the next flush is in an hour
        sequence.emit(2)
        sequence.end()
        writer.end_call(RequestId("c"), CallStatus.ENDED)
        later = writer.open_call(replace(new_call(), id=RequestId("later")))
        assert later is not None
        assert await later.wait(30.0)
        part, record = await _seen(store, sequence)
        call = await store.inner.get_call(RequestId("c"))
        assert record is not None
        assert call is not None
        assert (len(part.tokens), record.state, call.status) == (1, RequestState.DECODING, CallStatus.OPEN)
        assert await writer.flush(10) == 0
        await check(store, sequence, may_forget=False)
        assert await store.inner.get_call(RequestId("c")) == replace(new_call("a"), status=CallStatus.ENDED)


async def decoding(store: FaultyStore, writer: StoreWriter, **call: Any) -> SequenceDriver:
    """A decoding sequence of an open call; the store has both."""
    writer.open_call(new_call("a", **call))
    sequence = SequenceDriver(writer, RequestId("a"))
    sequence.begin()
    sequence.decode()
    while writer.num_pending:
        await store.release_one() if store.shut else await writer.flush(10)
    return sequence


async def test_a_claimed_sequence_is_reported_once_and_not_written() -> None:
    store, heard = FaultyStore(), list[AttemptId]()
    async with asyncio.timeout(10), new_writer(store, on_superseded=heard.append) as writer:
        sequence = await decoding(store, writer)
        sequence.emit(2)
        assert await writer.flush(10) == 0
        await store.inner.claim_call(RequestId("c"), (1, 0), THEIRS)
        for _ in range(3):
            sequence.emit(2)
            assert await writer.flush(10) == 0
        assert heard == [AttemptId(RequestId("a"), 1)]
        part, record = await _seen(store, sequence)
        assert (len(part.tokens), record and record.attempt) == (2, first_attempt(2))
        sequence.end()
        writer.end_call(RequestId("c"), CallStatus.ENDED)
        assert await writer.flush(10) == 0
    call = await store.inner.get_call(RequestId("c"))
    assert call is not None
    assert (call.owner, call.epoch, call.status) == (THEIRS, 2, CallStatus.OPEN)
    assert len(heard) == 1


async def test_a_claimed_idle_sequence_is_noticed_after_an_outage() -> None:
    store, heard = FaultyStore(), list[AttemptId]()
    async with asyncio.timeout(10), new_writer(store, on_superseded=heard.append, idle_ping_s=0.001) as writer:
        await decoding(store, writer)
        await store.inner.claim_call(RequestId("c"), (1, 0), THEIRS)
        degraded = asyncio.Event()
        writer._flusher._on_degraded = lambda now: degraded.set() if not now else None
        store.faults = [Fault.NOT_RECEIVED]
        await degraded.wait()
    assert heard == [AttemptId(RequestId("a"), 1)]


async def test_a_claimed_idle_sequence_is_noticed_after_a_lease_expired() -> None:
    """The store never failed for the writer; the owner lease reports the expiry."""
    store, heard = FaultyStore(), list[AttemptId]()
    async with asyncio.timeout(10), new_writer(store, on_superseded=heard.append) as writer:
        await decoding(store, writer)
        await store.inner.claim_call(RequestId("c"), (1, 0), THEIRS)
        assert (await writer.flush(10), heard) == (0, [])
        writer.put_again()
        assert (await writer.flush(10), heard) == (0, [AttemptId(RequestId("a"), 1)])


async def test_a_taken_over_sequence_continues_where_the_journal_ends() -> None:
    store = FaultyStore()
    async with asyncio.timeout(10), new_writer(store) as writer:
        sequence = await decoding(store, writer)
        sequence.emit(5)
        assert await writer.flush(10) == 0
    claimed = await store.inner.claim_call(RequestId("c"), (1, 0), THEIRS)
    record = await store.inner.get(RequestId("a"))
    assert claimed is not None
    assert record is not None
    async with asyncio.timeout(10), new_writer(store) as other:
        carried = replace(sequence, writer=other, attempt=first_attempt(2), owner_tag=owner_tag(THEIRS), emitted=[])
        other.adopt_call(claimed)
        other.adopt(record)
        carried.emit(5)  # tokens of the first attempt
        assert await other.flush(10) == 0
        store.inner = MemoryStore(OPTIONS)  # the server loses everything
        carried.decode()
        carried.emit(3)
        assert await other.flush(10) == 0
        carried.end()
        other.end_call(RequestId("c"), CallStatus.ENDED)
        assert await other.flush(10) == 0
    await check(store, carried, may_forget=False)
    call = await store.inner.get_call(RequestId("c"))
    assert call == replace(claimed, status=CallStatus.ENDED)


async def test_a_lost_journal_without_its_first_tokens_is_given_up() -> None:
    store = FaultyStore()
    async with asyncio.timeout(10), new_writer(store) as writer:
        sequence = await decoding(store, writer)
        sequence.emitted = [token(index) for index in range(7)]  # by another router; this one begins at token 7
        sequence.emit(1)
        assert await writer.flush(10) == 0
        sequence.emit(1)
        assert await writer.flush(10) == 0
    assert (await store.inner.read_journal(RequestId("a"), 0, 0.0)).tokens == ()


async def test_a_call_over_the_size_limit_is_not_written() -> None:
    store = FaultyStore()
    async with asyncio.timeout(10), new_writer(store) as writer:
        assert not writer.open_call(new_call("a", body=b" " * (MAX_BODY_BYTES + 1)))
        sequence = SequenceDriver(writer, RequestId("a"))
        sequence.begin()
        sequence.decode()
        sequence.emit(200)
        sequence.end()
        writer.end_call(RequestId("c"), CallStatus.ENDED)
        assert await writer.flush(10) == 0
    part, record = await _seen(store, sequence)
    assert part.tokens == ()
    assert record is not None
    assert record.state is RequestState.FINISHED
    assert await store.inner.get_call(RequestId("c")) is None


async def test_many_tokens_of_one_sequence_skip_the_interval() -> None:
    store = FaultyStore()
    async with asyncio.timeout(10), new_writer(store, journal_interval_s=3600.0) as writer:
        sequence = await decoding(store, writer)
        sequence.emit(1)
        assert await writer.flush(10) == 0  # the next flush is in an hour
        sequence.emit(MAX_UNWRITTEN_TOKENS)
        assert len((await store.inner.read_journal(sequence.id, 1, 10.0)).tokens) == MAX_UNWRITTEN_TOKENS


async def test_a_hung_store_does_not_block_token_writes() -> None:
    store = FaultyStore(shut=True)
    writer = new_writer(store)
    writer.start()
    writer.open_call(new_call("a"))
    sequence = SequenceDriver(writer, RequestId("a"))
    sequence.begin()
    sequence.decode()
    async with asyncio.timeout(10):
        await store.next_call()
    sequence.emit(10_000)
    sequence.end()
    assert store.num_calls == 1
    assert await writer.close(timeout_s=0.05) == 2


async def test_all_tokens_are_rewritten_to_a_restarted_server() -> None:
    with running_redis() as server:
        store = await connect(server.url, StoreOptions(timeout_s=1.0))
        heard: asyncio.Queue[bool] = asyncio.Queue()
        writer = StoreWriter(store, WriterOptions(retry_s=0.02, idle_ping_s=0.02), on_degraded=heard.put_nowait)
        async with asyncio.timeout(20), writer:
            sequence = await decoding(cast(FaultyStore, _Open(store)), writer)
            sequence.emit(100)
            assert await writer.flush(10) == 0
            server.kill()
            sequence.emit(100)
            assert await heard.get() is True
            server.start()
            sequence.emit(100)
            assert await heard.get() is False
            assert await writer.flush(10) == 0
            assert list((await store.read_journal(sequence.id, 0, 0.0)).tokens) == sequence.emitted
            assert await store.get_call(RequestId("c")) == new_call("a")
        await store.close()


@dataclass
class _Open:
    """A store without a gate."""

    inner: StateStore
    shut: bool = False
