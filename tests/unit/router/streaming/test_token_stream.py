"""Streams over all choices: order, back-pressure, errors, the deadline, and the switch to a second source."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from baton.domain.errors import Broken, DeadlineExceeded, ModelReplaced, Superseded, WorkerLost
from baton.domain.request import FinishReason
from baton.services.router.edge.disconnect import ClientTooSlow
from baton.services.router.generation import TakeChunk, TokenChunk
from baton.services.router.streaming import token_stream
from baton.services.router.streaming.token_stream import MAX_QUEUED_EVENTS, TokenStream
from baton.services.router.streaming.unread_buffer import UnreadBudget
from baton.services.router.text.choice_text import TokenEvent
from tests.unit.router.streaming.chunk_sources import ScriptedSource, chunks, request
from tests.unit.router.text.text_models import bundled

WAIT_S = 30.0


async def read(stream: TokenStream) -> list[TokenEvent]:
    events = []
    async with stream:
        while stream.num_running:
            event = await stream.next(WAIT_S)
            if event is not None:
                events.append(event)
    return events


def tokens_of(events: list[TokenEvent], choice: int) -> list[int]:
    return [event.token.token for event in events if event.choice == choice and event.token is not None]


async def test_a_finished_stream_has_every_token_and_closes_its_source() -> None:
    source = ScriptedSource({0: chunks([5, 6, 7]), 1: chunks([8])})
    stream = TokenStream(bundled(), request(2), source)
    events = await read(stream)
    assert (tokens_of(events, 0), tokens_of(events, 1)) == ([5, 6, 7], [8])
    assert (stream.counts, stream.usage().completion_tokens) == ([3, 1], 4)
    assert (sorted(source.completed), source.closed) == ([0, 1], True)


async def test_a_complete_text_counts_before_its_events_are_read() -> None:
    """A client that disconnects now leaves nothing to take over."""
    async with TokenStream(bundled(), request(1), ScriptedSource({0: chunks([5, 6])})) as stream:
        await stream.next(WAIT_S)
        assert (stream.generated, stream.num_running) == (True, 1)
    async with TokenStream(bundled(), request(1), ScriptedSource({0: [*chunks([5], None), asyncio.Event()]})) as stream:
        await stream.next(WAIT_S)
        assert not stream.generated


async def test_a_request_without_sequences_ends_at_once() -> None:
    stream = TokenStream(bundled(), request(2, sequences=()), ScriptedSource({}))
    assert [(e.choice, e.token, e.finish) for e in await read(stream)] == [
        (i, None, FinishReason.LENGTH) for i in (0, 1)
    ]


async def test_silence_gives_none() -> None:
    gate = asyncio.Event()
    async with TokenStream(bundled(), request(1), ScriptedSource({0: [gate, *chunks([5])]})) as stream:
        assert await stream.next(0.01) is None
        assert await stream.next(0.01) is None
        gate.set()
        event = await stream.next(WAIT_S)
        assert event is not None
        assert event.token is not None


async def test_a_reader_that_waits_holds_no_choice() -> None:
    """A row and an admission slot are free when decode is done, not when the client has read."""
    tokens = [5 + n % 7 for n in range(3 * MAX_QUEUED_EVENTS)]
    source = ScriptedSource({0: chunks(tokens), 1: chunks(tokens[::-1])})
    stream = TokenStream(bundled(), request(2), source)
    async with stream:
        for _ in range(5):
            await asyncio.sleep(0)
        assert (source.num_given, sorted(source.completed)) == (2 * len(tokens), [0, 1])
        events = list[TokenEvent]()
        while stream.num_running:
            event = await stream.next(WAIT_S)
            assert event is not None
            events.append(event)
    assert (tokens_of(events, 0), tokens_of(events, 1)) == (tokens, tokens[::-1])
    assert [event.token.index for event in events if event.choice == 0 and event.token] == [*range(len(tokens))]


async def test_the_journal_is_read_as_fast_as_its_reader() -> None:
    """Its tokens are in the store: a client that resumes a long answer is not hung up for them."""
    source = ScriptedSource({0: chunks([5] * 3 * MAX_QUEUED_EVENTS)}, holds_workers=False)
    async with TokenStream(bundled(), request(1), source) as stream:
        for _ in range(5):
            await asyncio.sleep(0)
        assert source.num_given == MAX_QUEUED_EVENTS + 1
        await stream.next(WAIT_S)
        for _ in range(5):
            await asyncio.sleep(0)
        assert source.num_given == MAX_QUEUED_EVENTS + 2
    assert source.closed is False


async def test_a_reader_beyond_the_budget_is_too_slow() -> None:
    source = ScriptedSource({0: chunks([5] * 3 * MAX_QUEUED_EVENTS)})
    budget = UnreadBudget(max_bytes=MAX_QUEUED_EVENTS * 20)
    async with TokenStream(bundled(), request(1), source, unread=budget) as stream:
        await asyncio.wait_for(asyncio.shield(stream.too_slow), WAIT_S)
        given = [await stream.next(WAIT_S) for _ in range(MAX_QUEUED_EVENTS)]
        assert [event.token.index for event in given if event and event.token] == [*range(MAX_QUEUED_EVENTS)]
        with pytest.raises(ClientTooSlow):
            await stream.next(WAIT_S)
    assert budget.num_bytes == 0


async def test_an_error_follows_unread_events_too() -> None:
    tokens = [5] * 3 * MAX_QUEUED_EVENTS
    source = ScriptedSource({0: [*chunks(tokens, finish=None), WorkerLost("gone")]})
    budget = UnreadBudget()
    async with TokenStream(bundled(), request(1), source, unread=budget) as stream:
        assert [(await stream.next(WAIT_S)) is not None for _ in tokens] == [True] * len(tokens)
        with pytest.raises(WorkerLost):
            await stream.next(WAIT_S)


async def test_an_error_follows_the_events_before_it() -> None:
    source = ScriptedSource({0: [*chunks([5, 6], finish=None), WorkerLost("gone")]})
    async with TokenStream(bundled(), request(1), source) as stream:
        assert [(await stream.next(WAIT_S)) is not None for _ in range(2)] == [True, True]
        with pytest.raises(WorkerLost):
            await stream.next(WAIT_S)


async def test_a_choice_without_an_end_is_an_internal_error() -> None:
    async with TokenStream(bundled(), request(1), ScriptedSource({0: []})) as stream:
        with pytest.raises(Broken):
            await stream.next(WAIT_S)


async def test_the_deadline_ends_a_silent_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "DEADLINE_GRACE_S", -4.99)  # the deadline of the sequences is 5 s
    with pytest.raises(DeadlineExceeded):
        await read(TokenStream(bundled(), request(1), ScriptedSource({0: [asyncio.Event()]})))


async def test_abort_wins_over_queued_events() -> None:
    async with TokenStream(bundled(), request(1), ScriptedSource({0: chunks([5, 6])})) as stream:
        await stream.next(WAIT_S)
        stream.abort(WorkerLost("gone"))
        with pytest.raises(WorkerLost):
            await stream.next(WAIT_S)


@pytest.mark.parametrize("by_source", [True, False])
async def test_a_superseded_stream_continues_from_the_second_source(by_source: bool) -> None:
    """Given events are skipped; an event that was only queued comes again."""
    first = ScriptedSource({0: [*chunks([5, 6], finish=None), asyncio.Event()], 1: chunks([8])})
    if by_source:
        first.scripts[0][-1] = Superseded("newer")  # type: ignore[index]
    second = ScriptedSource({0: chunks([5, 6, 7, 9]), 1: chunks([8])})
    stream, events = TokenStream(bundled(), request(2), first, lambda error: second), list[TokenEvent]()
    async with stream:
        while len(events) < 2:
            event = await stream.next(WAIT_S)
            assert event is not None
            events.append(event)
        if not by_source:
            stream.abort(Superseded("newer"))
        while stream.num_running:
            event = await stream.next(WAIT_S)
            if event is not None:
                events.append(event)
            stream.abort(Superseded("refused once more"))  # no effect on the second source
    assert (tokens_of(events, 0), tokens_of(events, 1)) == ([5, 6, 7, 9], [8])
    assert (first.closed, second.closed, stream.counts) == (False, True, [4, 1])


async def test_a_last_event_without_room_does_not_delay_the_close() -> None:
    source = ScriptedSource({0: chunks([5] * (MAX_QUEUED_EVENTS + 1))})
    async with asyncio.timeout(WAIT_S / 2):
        async with TokenStream(bundled(), request(1), source):
            for _ in range(5):
                await asyncio.sleep(0)
            assert source.completed == [0]
    assert source.closed is False


async def test_a_switch_that_is_cancelled_makes_no_second_source() -> None:
    """An open journal reader would keep a takeover running without a client."""
    released, sources = asyncio.Event(), list[ScriptedSource]()

    class SlowSource(ScriptedSource):
        def close(self, *, finished: bool) -> None:
            self.closed = finished

        async def _chunks(self, choice: int, take: TakeChunk | None) -> AsyncGenerator[TokenChunk, None]:
            try:
                await asyncio.Event().wait()
                yield TokenChunk((), 0)
            finally:
                await released.wait()

    def second(error: Superseded) -> ScriptedSource:
        sources.append(ScriptedSource({}))
        return sources[-1]

    stream = TokenStream(bundled(), request(1), SlowSource({0: []}), second)
    reading = asyncio.create_task(read(stream))
    for _ in range(5):
        await asyncio.sleep(0)
    stream.abort(Superseded("newer"))
    for _ in range(5):
        await asyncio.sleep(0)
    reading.cancel()
    asyncio.get_running_loop().call_later(0.01, released.set)
    await asyncio.wait([reading])
    assert (reading.cancelled(), [source.closed for source in sources]) == (True, [])


async def test_emitted_tokens_come_first_and_may_hold_the_end() -> None:
    [first] = chunks([5], finish=None)
    valid = request(1)
    sequences = tuple(replace(s, emitted=first.tokens) for s in valid.sequences)
    events = await read(TokenStream(bundled(), request(1, sequences=sequences), ScriptedSource({0: chunks([6])})))
    assert tokens_of(events, 0) == [5, 6]
    stop = bundled().decode([5], skip_special_tokens=True)
    source = ScriptedSource({0: chunks([6])})
    events = await read(TokenStream(bundled(), request(1, sequences=sequences, stop_strings=(stop,)), source))
    assert (events[-1].finish, source.completed, source.num_given) == (FinishReason.STOP, [0], 0)


@pytest.mark.parametrize("others", [[5, 9, 7], [9, 6, 7], [5]])
async def test_a_second_source_with_other_tokens_ends_the_stream(others: list[int]) -> None:
    """The tokens that its client has were never stored, and other weights have computed the answer since."""
    first, second = ScriptedSource({0: [*chunks([5, 6], None), asyncio.Event()]}), ScriptedSource({0: chunks(others)})
    stream = TokenStream(bundled(), request(1), first, lambda _: second)
    async with stream:
        assert None not in [await stream.next(WAIT_S) for _ in range(2)]
        stream.abort(Superseded("newer"))
        with pytest.raises(ModelReplaced, match="another model"):
            await stream.next(WAIT_S)


async def test_a_left_stream_is_freed_without_garbage_collection() -> None:
    """Its reader keeps it, and it may ask the reader for a second source until it is left."""

    class Reader:
        def __init__(self) -> None:
            self.stream = TokenStream(bundled(), request(1), ScriptedSource({0: chunks([5, 6])}), self.follow)

        def follow(self, error: Superseded) -> ScriptedSource:
            raise error

    gc.collect()
    gc.disable()
    try:
        reader = Reader()
        assert len(await read(reader.stream)) == 2
        stream = weakref.ref(reader.stream)
        del reader
        assert stream() is None
    finally:
        gc.enable()
