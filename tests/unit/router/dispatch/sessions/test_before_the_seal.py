"""What decode sends before the seal, in a call and in a session: held events, failures, the end, a loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.domain.errors import DeadlineExceeded, WorkerLost
from baton.rpc.gen import decode_pb2
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource
from baton.services.router.generation import TokenChunk
from tests.unit.router.dispatch.test_attempt import (
    IMPORTED,
    PAIR,
    UNAVAILABLE,
    Running,
    chunk,
    decode_failed,
    running,
    sealed,
    tokens,
)
from tests.unit.router.dispatch.test_attempt_rows import ScriptedSessions, row

Waiting = tuple[Running, asyncio.Task[TokenChunk]]


class Decode:
    """Sends to an attempt that waits for its seal, in a call or in a session."""

    def __init__(self, in_session: bool) -> None:
        self.sessions = ScriptedSessions() if in_session else None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Waiting]:
        async with running(sessions=self.sessions) as r:
            first = asyncio.create_task(r.attempt.next())
            await asyncio.sleep(0)
            try:
                yield r, first
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def send(self, r: Running, *events: decode_pb2.GenerateEvent | None) -> None:
        """Returns when the attempt has taken all of them."""
        if self.sessions is None:
            r.workers.decode.send(*events)
            await r.workers.decode.items.join()
            return
        for event in events:
            if event is None:
                self.sessions.stream.end()
            else:
                self.sessions.stream.put(event)

    async def lose(self, r: Running) -> None:
        if self.sessions is None:
            r.workers.decode.send(UNAVAILABLE)
        else:
            self.sessions.stream.end(WorkerLost("gone"))


@pytest.fixture(params=[False, True], ids=["call", "session"])
def decode(request: pytest.FixtureRequest) -> Decode:
    return Decode(request.param)


async def test_what_decode_sends_before_the_seal_follows_it(decode: Decode):
    async with decode.waiting() as (r, first):
        await decode.send(r, IMPORTED, tokens(1, 2), None)
        assert not first.done()
        r.workers.prefill.send(sealed())
        assert [await first, *await r.chunks(1)] == [chunk(0), chunk(1, 2)]
        with pytest.raises(AttemptFailure, match="decode ended"):
            await r.chunks(1)


async def test_a_failure_with_nothing_before_it_ends_the_wait(decode: Decode):
    async with decode.waiting() as (r, first):
        await decode.send(r, decode_failed("link_broken"))
        with pytest.raises(AttemptFailure, match="said so"):
            await first


async def test_a_failure_behind_an_import_waits_for_the_seal(decode: Decode):
    async with decode.waiting() as (r, first):
        await decode.send(r, IMPORTED, decode_failed("link_broken"))
        await asyncio.sleep(0)
        assert not first.done()
        r.workers.prefill.send(sealed())
        assert await first == chunk(0)
        with pytest.raises(AttemptFailure, match="said so"):
            await r.chunks(1)


async def test_a_lost_decode_worker_ends_the_wait_behind_an_import(decode: Decode):
    async with decode.waiting() as (r, first):
        await decode.send(r, IMPORTED)
        await decode.lose(r)
        with pytest.raises(AttemptFailure) as failed:
            await first
        assert (failed.value.error.code, failed.value.fault_source) == ("worker_lost", FaultSource.DECODE)
        assert r.workers.suspected == ["decode"]


async def test_the_end_of_decode_alone_waits_for_the_seal(decode: Decode):
    async with decode.waiting() as (r, first):
        await decode.send(r, None)
        await asyncio.sleep(0)
        assert not first.done()
        r.workers.prefill.send(sealed())
        assert await first == chunk(0)
        with pytest.raises(AttemptFailure, match="decode ended"):
            await r.chunks(1)


async def test_a_read_that_runs_at_the_seal_is_the_next_ones(decode: Decode):
    async with decode.waiting() as (r, first):
        r.workers.prefill.send(sealed())
        assert await first == chunk(0)
        await decode.send(r, IMPORTED)
        second = asyncio.create_task(r.attempt.next())
        await decode.send(r, tokens(1))
        assert await second == chunk(1)


async def test_the_deadline_ends_the_wait(decode: Decode):
    async with running(deadline_s=0.01, sessions=decode.sessions) as r:
        with pytest.raises(DeadlineExceeded):
            await r.chunks(1)


async def test_a_wait_that_is_cancelled_ends_the_attempt(decode: Decode):
    async with decode.waiting() as (r, first):
        await decode.send(r, IMPORTED)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert r.workers.aborts == ["cancelled", "cancelled"]


async def test_a_decode_worker_lost_by_its_heartbeat_ends_the_wait(decode: Decode):
    async with decode.waiting() as (r, first):
        await decode.send(r, IMPORTED)
        r.workers.lost[PAIR.decode.incarnation]()
        with pytest.raises(AttemptFailure, match="decode restarted"):
            await first


async def test_an_answer_of_another_kind_ends_the_wait_in_a_session():
    decode = Decode(in_session=True)
    async with decode.waiting() as (_, first):
        assert decode.sessions is not None
        decode.sessions.stream.put(decode_pb2.ReserveReply())
        with pytest.raises(AttemptFailure, match="ReserveReply in the stream of an attempt"):
            await first


async def test_rows_between_seal_and_read_stay_in_the_session():
    """The seal is set, and its reader has not run yet: what comes then must be in order behind it."""
    decode = Decode(in_session=True)
    async with decode.waiting() as (r, first):
        assert decode.sessions is not None
        stream = decode.sessions.stream
        stream.put(IMPORTED)
        r.attempt._prefill.sealed.set_result(sealed().sealed)  # type: ignore[union-attr]
        stream.put_row(row(1))
        stream.put(decode_failed("link_broken"))
        assert [await first, *await r.chunks(1)] == [chunk(0), chunk(1)]
        with pytest.raises(AttemptFailure, match="said so"):
            await r.chunks(1)
