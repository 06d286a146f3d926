"""The relay writes once a pass, takes nothing while the client does not read, and hands errors on in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.domain.errors import WorkerLost
from baton.services.router.edge import sse
from baton.services.router.generation import TokenChunk
from baton.services.router.streaming import sse_stream
from baton.services.router.streaming.sse_stream import EventRelay
from baton.services.router.streaming.token_stream import TokenStream
from baton.services.router.text.choice_text import TokenEvent
from tests.unit.router.streaming.chunk_sources import ScriptedSource, chunks, request
from tests.unit.router.text.text_models import bundled

PING_S = 60.0


class RecordingSink:
    """Keeps what is written. `blocked` is the test's."""

    def __init__(self) -> None:
        self.blocked = False
        self.writes: list[bytes] = []
        self.written = asyncio.Event()
        self.callback: Callable[[], None] | None = None

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self.callback = callback

    def hold(self) -> None: ...

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self.written.set()

    async def drain(self) -> None: ...

    def close(self) -> None: ...

    def resume(self) -> None:
        self.blocked = False
        assert self.callback is not None
        self.callback()


def line(event: TokenEvent) -> bytes:
    return b"" if event.token is None else b"%d " % event.token.token


def stream_of(*script: TokenChunk | asyncio.Event | WorkerLost) -> TokenStream:
    return TokenStream(bundled(), request(1), ScriptedSource({0: script}))


async def test_what_comes_in_one_pass_is_one_write() -> None:
    sink, gate = RecordingSink(), asyncio.Event()
    async with stream_of(*chunks([5, 6, 7], None), gate, *chunks([8])) as stream:
        running = asyncio.create_task(EventRelay(stream, sink, line, PING_S).run())
        await asyncio.wait_for(sink.written.wait(), 5)
        assert sink.writes == [b"5 6 7 "]
        gate.set()
        last = await asyncio.wait_for(running, 5)
    assert sink.writes == [b"5 6 7 "]
    assert last == b"8 ", "the end of the response takes the last lines along"
    assert sink.callback is None


async def test_the_end_waits_for_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, gate, scheduled = RecordingSink(), asyncio.Event(), list[int]()
    schedule = EventRelay._schedule

    def count(relay: EventRelay) -> None:
        scheduled.append(stream.num_running)
        schedule(relay)

    monkeypatch.setattr(EventRelay, "_schedule", count)
    async with stream_of(*chunks([5], None), gate, *chunks([6, 7])) as stream:
        running = asyncio.create_task(EventRelay(stream, sink, line, PING_S).run())
        await asyncio.wait_for(sink.written.wait(), 5)
        scheduled.clear()
        gate.set()
        assert await asyncio.wait_for(running, 5) == b"6 7 "
    assert len(scheduled) == 1, "for the token before the last one only"
    assert sink.writes == [b"5 "]


async def test_the_end_waits_for_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, gate, moved, move = RecordingSink(), asyncio.Event(), asyncio.Event(), EventRelay._move

    def note(relay: EventRelay) -> None:
        move(relay)
        moved.set()

    monkeypatch.setattr(EventRelay, "_move", note)
    async with stream_of(*chunks([5], None), gate, *chunks([6])) as stream:
        running = asyncio.create_task(EventRelay(stream, sink, line, PING_S).run())
        await asyncio.wait_for(sink.written.wait(), 5)
        sink.blocked = True
        moved.clear()
        gate.set()
        await asyncio.wait_for(moved.wait(), 5)
        assert stream.num_running == 1
        sink.resume()
        assert await asyncio.wait_for(running, 5) == b"6 "


async def test_nothing_is_taken_while_the_client_does_not_read() -> None:
    sink = RecordingSink()
    sink.blocked = True
    async with stream_of(*chunks([5] * 300)) as stream:
        running = asyncio.create_task(EventRelay(stream, sink, line, PING_S).run())
        [reading] = stream._tasks.values()
        await asyncio.wait_for(asyncio.shield(reading), 5)  # the workers are not held up
        assert stream.generated
        assert not sink.writes
        assert stream.num_running == 1
        sink.resume()
        last = await asyncio.wait_for(running, 5)
    assert b"".join(sink.writes) + last == b"5 " * 300
    assert max(map(len, sink.writes)) <= 2 * sse_stream.MAX_EVENTS


async def test_an_error_of_the_stream_comes_after_the_events_before_it() -> None:
    sink = RecordingSink()
    async with stream_of(*chunks([5, 6], None), WorkerLost("gone")) as stream:
        await asyncio.wait_for(EventRelay(stream, sink, line, PING_S).run(), 5)
        assert b"".join(sink.writes) == b"5 6 "
        with pytest.raises(WorkerLost):
            await stream.next(PING_S)


async def test_an_error_of_a_line_comes_after_the_lines_before_it() -> None:
    sink = RecordingSink()

    def failing(event: TokenEvent) -> bytes:
        if event.token is not None and event.token.token == 6:
            raise ValueError("no line")
        return line(event)

    async with stream_of(*chunks([5, 6, 7])) as stream:
        with pytest.raises(ValueError, match="no line"):
            await asyncio.wait_for(EventRelay(stream, sink, failing, PING_S).run(), 5)
    assert sink.writes == [b"5 "]


async def test_a_sink_that_fails_ends_the_relay() -> None:
    class BrokenSink(RecordingSink):
        def write(self, data: bytes) -> None:
            raise OSError("broken")

    async with stream_of(*chunks([5], None), asyncio.Event()) as stream:
        with pytest.raises(OSError, match="broken"):
            await asyncio.wait_for(EventRelay(stream, BrokenSink(), line, PING_S).run(), 5)


async def test_a_silent_stream_has_pings_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = RecordingSink()
    async with stream_of(asyncio.Event()) as stream:
        stream.deadline = asyncio.get_running_loop().time() + 0.2
        await asyncio.wait_for(EventRelay(stream, sink, line, 0.02).run(), 5)
        assert sink.writes
        assert set(sink.writes) == {sse.PING}
        assert not stream.has_error


async def test_a_client_that_does_not_read_has_no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_stream, "BLOCKED_S", 0.02)
    sink = RecordingSink()
    sink.blocked = True
    async with stream_of(asyncio.Event()) as stream:
        running = asyncio.create_task(EventRelay(stream, sink, line, 0.02).run())
        await asyncio.wait((running,), timeout=0.2)
        assert not sink.writes
        sink.resume()
        await asyncio.wait_for(sink.written.wait(), 5)
        assert set(sink.writes) == {sse.PING}
        running.cancel()
        await asyncio.wait((running,))
