"""An attempt whose session hands it rows while it waits: checks, failures and interruption are those of a read."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.domain.errors import DeadlineExceeded
from baton.domain.request import FinishReason
from baton.rpc.gen import session_pb2
from baton.services.router.dispatch.sessions.session_stream import SessionStream
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource
from baton.services.router.generation import TokenChunk
from tests.unit.router.dispatch.test_attempt import IMPORTED, PAIR, Running, chunk, running, sealed, tokens

DEADLINE_S = 60.0


class ScriptedSessions:
    """A session with decode that a test fills by its stream."""

    def __init__(self) -> None:
        self.stream = SessionStream(lambda: None)

    def serves(self, worker: object) -> bool:
        return True

    def takes_opens(self, worker: object) -> bool:
        return False

    def open(self, worker: object, request: object, metadata: object) -> SessionStream:
        return self.stream


def row(index: int, *tokens: int) -> session_pb2.TokenRow:
    return session_pb2.TokenRow(first_index=index, tokens=tokens or (10 + index,))


@asynccontextmanager
async def waiting(
    sessions: ScriptedSessions, taken: list[TokenChunk]
) -> AsyncIterator[tuple[Running, asyncio.Task[TokenChunk]]]:
    """An attempt in a session that has given two chunks, and a read of it that waits and takes what comes."""

    def take(chunk: TokenChunk) -> bool:
        taken.append(chunk)
        return True

    async with running(deadline_s=DEADLINE_S, sessions=sessions) as r:
        r.workers.prefill.send(sealed())
        sessions.stream.put(IMPORTED)
        sessions.stream.put_row(row(1))
        assert await r.chunks(2) == [chunk(0), chunk(1)]
        reading = asyncio.create_task(r.attempt.next(take))
        await asyncio.sleep(0)
        yield r, reading


@pytest.mark.parametrize("index", [2, 4], ids=["duplicate", "gap"])
async def test_a_row_that_is_handed_over_is_checked_as_one_that_is_read(index: int):
    sessions, taken = ScriptedSessions(), list[TokenChunk]()
    async with waiting(sessions, taken) as (r, reading):
        for each in (row(2), row(index), row(3)):
            sessions.stream.put_row(each)
        with pytest.raises(AttemptFailure) as failed:
            await reading
        assert (failed.value.error.code, failed.value.fault_source) == ("integrity_failure", FaultSource.LINK)
        assert taken == [chunk(2)]
        assert r.tracked.engine_request().num_emitted == 3


async def test_the_deadline_ends_a_read_that_takes_rows(monkeypatch: pytest.MonkeyPatch):
    sessions, taken = ScriptedSessions(), list[TokenChunk]()
    async with waiting(sessions, taken) as (_, reading):
        sessions.stream.put_row(row(2))
        assert taken == [chunk(2)]
        assert not reading.done()
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + DEADLINE_S)
        with pytest.raises(DeadlineExceeded):
            await reading
        assert taken == [chunk(2)]


async def test_a_lost_worker_ends_a_read_that_takes_rows():
    sessions, taken = ScriptedSessions(), list[TokenChunk]()
    async with waiting(sessions, taken) as (r, reading):
        r.workers.lost[PAIR.decode.incarnation]()
        sessions.stream.put_row(row(2))
        with pytest.raises(AttemptFailure, match="decode restarted"):
            await reading
        assert taken == []


async def test_an_ended_attempt_is_freed_without_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        async with running() as r:
            r.workers.prefill.send(sealed())
            r.workers.decode.send(IMPORTED, tokens(1, finish=FinishReason.STOP))
            await r.chunks(2)
            attempt = weakref.ref(r.attempt)
        del r
        assert attempt() is None
    finally:
        gc.enable()
