"""The journal in the book converges to what was written: in order, no gap, no duplicate, and an end only after it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.state.base import CallRecord, CallStatus, JournalPart, RequestRecord, StateBook
from baton.state.connect import connect
from baton.state.ledger import first_attempt
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from baton.state.writer import MAX_BODY_BYTES, MAX_WAITING_TOKENS, BookWriter
from tests.property.faulty_book import OPTIONS, Fault, FaultyBook
from tests.redis_server import running_redis

E = RequestEvent
TO_DECODING = (E.ENQUEUE, E.PROMISE, E.DECODE)
OURS, THEIRS = OwnerId("router/1"), OwnerId("other/1")


def new_call(*jobs: str, body: bytes = b"{}") -> CallRecord:
    ids = tuple(RequestId(job) for job in jobs)
    return CallRecord(RequestId("c"), OURS, 1, CallStatus.OPEN, "/v1/completions", body, "", 17, 5, ids)


def new_writer(book: FaultyBook, **news: Any) -> BookWriter:
    return BookWriter(cast(StateBook, book), retry_s=0.001, **{"journal_interval_s": 0.001, **news})


def token(index: int) -> OutputToken:
    return OutputToken(index, 1000 + index, TokenLogprobs(-0.5 * index) if index % 3 == 0 else None)


@dataclass
class Life:
    """One job as its router lives it, and what the book must come to say of it."""

    writer: BookWriter
    id: RequestId
    attempt: int = 1
    emitted: list[OutputToken] = field(default_factory=list)
    finish: FinishReason | None = None
    decoding: bool = False

    def begin(self) -> None:
        self.writer.create(RequestRecord(self.id, 1, RequestState.RECEIVED, "router", "tiny", num_prompt_tokens=3))
        self.writer.advance(self._id, E.ENQUEUE)

    def decode(self) -> None:
        for event in (E.PROMISE, E.DECODE):
            self.writer.advance(self._id, event)
        self.decoding = True

    def emit(self, num_tokens: int, *, again: int = 0) -> None:
        """`again`: so many tokens are told once more."""
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
        return AttemptId(self.id, self.attempt)


FAULTS = st.lists(st.sampled_from([Fault.NONE, Fault.NOT_HEARD, Fault.ANSWER_LOST]), max_size=20)
EMIT = st.tuples(st.integers(0, 1), st.sampled_from(["emit", "emit", "emit", "retry", "end"]), st.integers(0, 5))


@given(script=st.lists(st.none() | EMIT, max_size=40), faults=FAULTS, losses=st.lists(st.integers(0, 20), max_size=3))
@settings(max_examples=150, deadline=None)
def test_the_journal_converges_to_what_was_written(
    script: list[tuple[int, str, int] | None], faults: list[Fault], losses: list[int]
) -> None:
    for position in losses:
        faults.insert(position, Fault.RECORDS_LOST)
    asyncio.run(_live_through(script, faults))


async def _live_through(script: list[tuple[int, str, int] | None], faults: list[Fault]) -> None:
    """Two jobs of one call; between the steps, sometimes, one call of the writer comes through. What was at rest when
    the server lost everything stays lost: a second look at the living brings all of theirs back."""
    book = FaultyBook(faults, shut=True)
    async with asyncio.timeout(30), new_writer(book) as writer:
        writer.open_call(new_call("a", "b"))
        lives = [Life(writer, RequestId(name)) for name in "ab"]
        for life in lives:
            life.begin()
        for step in script:
            if step is None:
                if writer.num_pending:
                    await book.let_pass()
                    await _look(book, lives)
            else:
                _act(lives[step[0]], step[1], step[2])
        book.open()
        for life in lives:
            if life.finish is None:
                life.emit(1)  # whoever lives goes on, and so finds out what is lost
        assert await writer.flush(timeout_s=20) == 0
        for life in lives:
            await _check(book, life, may_forget=Fault.RECORDS_LOST in faults)
    assert not writer.degraded


async def _look(book: FaultyBook, lives: list[Life]) -> None:
    """Whoever looks while the writer is at work sees a beginning of what was emitted, and all of what has ended."""
    for life in lives:
        part, record = await _seen(book, life)
        assert list(part.tokens) == life.emitted[: len(part.tokens)]
        if record is not None and record.state is RequestState.FINISHED:
            assert (list(part.tokens), part.finish) == (life.emitted, life.finish)


def _act(life: Life, what: str, number: int) -> None:
    if life.finish is not None:
        return
    if not life.decoding:
        life.decode()
    match what:
        case "emit":
            life.emit(number, again=number // 2)
        case "retry":
            life.retry()
        case _:
            life.end()


async def _seen(book: FaultyBook, life: Life) -> tuple[JournalPart, RequestRecord | None]:
    return await book.inner.read_journal(life.id, 0, 0.0), await book.inner.get(life.id)


async def _check(book: FaultyBook, life: Life, *, may_forget: bool) -> None:
    part, record = await _seen(book, life)
    if record is None and life.finish is not None and may_forget:
        return
    assert (list(part.tokens), part.finish) == (life.emitted, life.finish)
    assert record is not None
    assert (record.attempt, record.state.terminal) == (life.attempt, life.finish is not None)


async def test_tokens_of_all_jobs_go_in_one_round_trip() -> None:
    book = FaultyBook()
    async with asyncio.timeout(10), new_writer(book) as writer:
        writer.open_call(new_call(*(f"j{number}" for number in range(50))))
        lives = [Life(writer, RequestId(f"j{number}")) for number in range(50)]
        for life in lives:
            life.begin()
        assert await writer.flush(10) == 0
        num_calls = book.num_calls
        for life in lives:
            life.emit(3)
        assert await writer.flush(10) == 0
        assert book.num_calls == num_calls + 1
        for life in lives:
            await _check(book, life, may_forget=False)


async def test_a_call_and_its_jobs_end_after_their_tokens() -> None:
    book = FaultyBook()
    async with asyncio.timeout(10), new_writer(book, journal_interval_s=3600.0) as writer:
        life = await _decoding(book, writer)
        life.emit(1)  # the first round may begin at once; the next one not before an hour has passed
        await book.inner.read_journal(life.id, 0, 10.0)
        life.emit(2)
        life.end()
        writer.end_call(RequestId("c"), CallStatus.ENDED)
        later = Life(writer, RequestId("later"))
        later.begin()
        while await book.inner.get(later.id) is None:
            await book.inner.read_journal(later.id, 0, 0.001)  # lets time pass
        part, record = await _seen(book, life)
        call = await book.inner.get_call(RequestId("c"))
        assert record is not None
        assert call is not None
        assert (len(part.tokens), record.state, call.status) == (1, RequestState.DECODING, CallStatus.OPEN)
        assert await writer.flush(10) == 0
        await _check(book, life, may_forget=False)
        assert await book.inner.get_call(RequestId("c")) == replace(new_call("a"), status=CallStatus.ENDED)


async def _decoding(book: FaultyBook, writer: BookWriter, **call: Any) -> Life:
    """A job that decodes, of a call that is open, and the book knows both."""
    writer.open_call(new_call("a", **call))
    life = Life(writer, RequestId("a"))
    life.begin()
    life.decode()
    while writer.num_pending:
        await book.let_pass() if book.shut else await writer.flush(10)
    return life


async def test_a_claimed_job_is_written_no_more_and_its_router_hears_of_it_once() -> None:
    book, heard = FaultyBook(), list[AttemptId]()
    async with asyncio.timeout(10), new_writer(book, on_superseded=heard.append) as writer:
        life = await _decoding(book, writer)
        life.emit(2)
        assert await writer.flush(10) == 0
        await book.inner.claim_call(RequestId("c"), 1, THEIRS)
        for _ in range(3):
            life.emit(2)
            assert await writer.flush(10) == 0
        assert heard == [AttemptId(RequestId("a"), 1)]
        part, record = await _seen(book, life)
        assert (len(part.tokens), record and record.attempt) == (2, first_attempt(2))
        life.end()
        writer.end_call(RequestId("c"), CallStatus.ENDED)
        assert await writer.flush(10) == 0
    call = await book.inner.get_call(RequestId("c"))
    assert call is not None
    assert (call.owner, call.epoch, call.status) == (THEIRS, 2, CallStatus.OPEN)
    assert len(heard) == 1


async def test_a_silent_job_that_was_claimed_is_noticed_after_an_outage() -> None:
    book, heard = FaultyBook(), list[AttemptId]()
    async with asyncio.timeout(10), new_writer(book, on_superseded=heard.append, idle_ping_s=0.001) as writer:
        await _decoding(book, writer)
        await book.inner.claim_call(RequestId("c"), 1, THEIRS)
        degraded = asyncio.Event()
        writer._scribe._on_degraded = lambda now: degraded.set() if not now else None
        book.faults = [Fault.NOT_HEARD]
        await degraded.wait()
    assert heard == [AttemptId(RequestId("a"), 1)]


async def test_a_silent_job_that_was_claimed_is_noticed_when_its_router_s_lease_had_lapsed() -> None:
    """The book was never away for the writer: somebody else noticed, and says so."""
    book, heard = FaultyBook(), list[AttemptId]()
    async with asyncio.timeout(10), new_writer(book, on_superseded=heard.append) as writer:
        await _decoding(book, writer)
        await book.inner.claim_call(RequestId("c"), 1, THEIRS)
        assert (await writer.flush(10), heard) == (0, [])
        writer.doubt()
        assert (await writer.flush(10), heard) == (0, [AttemptId(RequestId("a"), 1)])


async def test_a_job_that_is_carried_on_goes_on_where_the_journal_ends() -> None:
    book = FaultyBook()
    async with asyncio.timeout(10), new_writer(book) as writer:
        life = await _decoding(book, writer)
        life.emit(5)
        assert await writer.flush(10) == 0
    claimed = await book.inner.claim_call(RequestId("c"), 1, THEIRS)
    record = await book.inner.get(RequestId("a"))
    assert claimed is not None
    assert record is not None
    async with asyncio.timeout(10), new_writer(book) as other:
        carried = replace(life, writer=other, attempt=first_attempt(2), emitted=[])
        other.adopt_call(claimed)
        other.adopt(record)
        carried.emit(5)  # what the first attempt emitted
        assert await other.flush(10) == 0
        book.inner = MemoryBook(OPTIONS)  # the server loses everything
        carried.decode()
        carried.emit(3)
        assert await other.flush(10) == 0
        carried.end()
        other.end_call(RequestId("c"), CallStatus.ENDED)
        assert await other.flush(10) == 0
    await _check(book, carried, may_forget=False)
    call = await book.inner.get_call(RequestId("c"))
    assert call == replace(claimed, status=CallStatus.ENDED)


async def test_a_journal_whose_beginning_is_unknown_is_given_up_when_it_is_lost() -> None:
    book = FaultyBook()
    async with asyncio.timeout(10), new_writer(book) as writer:
        life = await _decoding(book, writer)
        life.emitted = [token(index) for index in range(7)]  # by somebody else; we begin at token 7
        life.emit(1)
        assert await writer.flush(10) == 0
        life.emit(1)
        assert await writer.flush(10) == 0
    assert (await book.inner.read_journal(RequestId("a"), 0, 0.0)).tokens == ()


async def test_a_call_that_is_too_large_is_not_written_nor_are_its_tokens() -> None:
    book = FaultyBook()
    async with asyncio.timeout(10), new_writer(book) as writer:
        assert not writer.open_call(new_call("a", body=b" " * (MAX_BODY_BYTES + 1)))
        life = Life(writer, RequestId("a"))
        life.begin()
        life.decode()
        life.emit(200)
        life.end()
        writer.end_call(RequestId("c"), CallStatus.ENDED)
        assert await writer.flush(10) == 0
    part, record = await _seen(book, life)
    assert part.tokens == ()
    assert record is not None
    assert record.state is RequestState.FINISHED
    assert await book.inner.get_call(RequestId("c")) is None


async def test_many_tokens_of_one_job_do_not_wait_for_the_interval() -> None:
    book = FaultyBook()
    async with asyncio.timeout(10), new_writer(book, journal_interval_s=3600.0) as writer:
        life = await _decoding(book, writer)
        life.emit(1)  # the first round may begin at once; the next one not before an hour has passed
        await book.inner.read_journal(life.id, 0, 10.0)
        life.emit(MAX_WAITING_TOKENS)
        assert len((await book.inner.read_journal(life.id, 1, 10.0)).tokens) == MAX_WAITING_TOKENS


async def test_a_hung_book_holds_nobody_who_writes_tokens() -> None:
    book = FaultyBook(shut=True)
    writer = new_writer(book)
    writer.start()
    writer.open_call(new_call("a"))
    life = Life(writer, RequestId("a"))
    life.begin()
    life.decode()
    async with asyncio.timeout(10):
        await book.next_call()
    life.emit(10_000)
    life.end()
    assert book.num_calls == 1
    assert await writer.close(timeout_s=0.05) == 2


async def test_a_real_server_that_lost_everything_is_told_all_tokens_again() -> None:
    with running_redis() as server:
        book = await connect(server.url, BookOptions(timeout_s=1.0))
        heard: asyncio.Queue[bool] = asyncio.Queue()
        writer = BookWriter(book, on_degraded=heard.put_nowait, retry_s=0.02, idle_ping_s=0.02)
        async with asyncio.timeout(20), writer:
            life = await _decoding(cast(FaultyBook, _Open(book)), writer)
            life.emit(100)
            assert await writer.flush(10) == 0
            server.kill()
            life.emit(100)
            assert await heard.get() is True
            server.start()
            life.emit(100)
            assert await heard.get() is False
            assert await writer.flush(10) == 0
            assert list((await book.read_journal(life.id, 0, 0.0)).tokens) == life.emitted
            assert await book.get_call(RequestId("c")) == new_call("a")
        await book.close()


@dataclass
class _Open:
    """A book without a gate."""

    inner: StateBook
    shut: bool = False
