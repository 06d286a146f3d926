"""A reservation's reply: its limit and the request's deadline, by a session and by a call."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.domain.errors import WorkerLost
from baton.domain.worker import WorkerRecord
from baton.rpc.gen import decode_pb2
from baton.services.router.dispatch.sessions.session_or_call import send_reserve
from baton.services.router.dispatch.sessions.session_stream import RESERVATION, SessionStream
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource
from tests.unit.router.dispatch.test_placement import decode

LONG_S = 3600.0
WAIT_S = 10.0
SHORT_S = 0.02
REPLY = decode_pb2.ReserveReply(reserved=decode_pb2.Reserved(reservation_id="r-1"))


class Decode:
    """Gets reservations in a session, or by calls that nobody answers."""

    def __init__(self, *, in_session: bool = True) -> None:
        self.num_aborted = 0
        self.stream = SessionStream(self._on_cancel, RESERVATION)
        self.worker_sessions = self if in_session else None

    def takes_opens(self, worker: WorkerRecord) -> bool:
        return True

    def reserve(self, *_: object) -> SessionStream:
        return self.stream

    def decode_stub(self, worker: WorkerRecord) -> Any:
        async def call(request: object, timeout: float, metadata: object) -> decode_pb2.ReserveReply:
            await asyncio.Event().wait()
            return REPLY

        return SimpleNamespace(Reserve=call)

    def _on_cancel(self) -> None:
        self.num_aborted += 1

    async def ask(self, timeout_s: float, within_s: float = math.inf) -> decode_pb2.ReserveReply:
        deadline = asyncio.get_running_loop().time() + within_s
        return await send_reserve(cast(Any, self), decode(0), decode_pb2.ReserveRequest(), timeout_s, (), deadline)


async def test_a_reply_ends_the_timer_and_no_stream_is_aborted():
    asked = Decode()
    asked.stream.put(REPLY)
    asked.stream.end()
    assert await asked.ask(SHORT_S, SHORT_S) == REPLY
    assert asked.num_aborted == 0


async def test_a_worker_that_does_not_reply_in_time_counts_as_lost():
    asked = Decode()
    with pytest.raises(AttemptFailure, match="in time") as failed:
        await asked.ask(SHORT_S, LONG_S)
    assert failed.value.fault_source is FaultSource.DECODE
    assert isinstance(failed.value.error, WorkerLost)
    assert asked.num_aborted == 1


@pytest.mark.parametrize("in_session", [True, False])
@pytest.mark.parametrize("within_s", [SHORT_S, 0.0, -1.0])
async def test_a_request_that_is_late_blames_no_worker(in_session: bool, within_s: float):
    asked = Decode(in_session=in_session)
    async with asyncio.timeout(WAIT_S) as limit:
        with pytest.raises(TimeoutError):
            await asked.ask(LONG_S, within_s)
    assert not limit.expired()
    assert asked.num_aborted == in_session


@pytest.mark.parametrize("in_session", [True, False])
async def test_a_caller_that_is_cancelled_hears_of_nothing_else(in_session: bool):
    asked = Decode(in_session=in_session)
    asking = asyncio.create_task(asked.ask(LONG_S, LONG_S))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert asked.num_aborted == in_session


async def test_a_cancellation_in_the_pass_of_the_timer_stays_one():
    """The stream is cancelled by then, but the caller has more to end than this attempt."""
    asked = Decode()
    asking = asyncio.create_task(asked.ask(LONG_S, LONG_S))
    await asyncio.sleep(0)
    asked.stream.cancel()  # as the timer does
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_lost_session_is_a_lost_worker():
    asked = Decode()
    asking = asyncio.create_task(asked.ask(LONG_S))
    await asyncio.sleep(0)
    asked.stream.end(WorkerLost("no connection"))
    with pytest.raises(AttemptFailure, match="no connection"):
        await asking
