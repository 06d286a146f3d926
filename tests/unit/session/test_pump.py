"""The timer of a session on the loop that services run on."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from baton.rpc.gen import session_pb2 as pb
from baton.session.lifecycle import SessionState
from baton.session.pump import SessionPump
from baton.session.session import WORKER_KINDS, MessageSession, SessionLimits
from baton.session.tags import ConnectionKeys

DEADLINE_S = 30.0


def test_a_timer_that_is_due_is_armed_again_under_uvloop():
    """uvloop gives such a timer a handle without `when`: connections ended as soon as they were opened."""

    async def arm_twice() -> SessionState:
        changed = asyncio.Event()
        now = asyncio.get_running_loop().time()
        session = MessageSession(1, WORKER_KINDS, SessionLimits(dial_s=0.0), now)
        pump = SessionPump(session, lambda _: None, changed.set)
        pump.start()
        pump._arm()  # as after every frame
        await asyncio.wait_for(changed.wait(), DEADLINE_S)
        pump.close()
        return session.state

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(arm_twice()) is SessionState.LOST


class DyingConnection:
    """Ends as a call does whose client is gone: gRPC also cancels the handler that reads it."""

    wire = "grpc"

    def __init__(self) -> None:
        self.closed = False
        self._sending = asyncio.Event()

    async def send(self, message: pb.SessionMessage) -> None:
        self._sending.set()
        await asyncio.Event().wait()

    async def receive(self) -> pb.SessionMessage | None:
        handler = asyncio.current_task()
        assert handler is not None
        await self._sending.wait()
        asyncio.get_running_loop().call_soon(handler.cancel)
        return None

    def close(self) -> None:
        self.closed = True


async def test_a_session_is_broken_though_its_handler_is_cancelled():
    """Else its streams would wait until the connection was silent for too long."""
    session = MessageSession(1, WORKER_KINDS, SessionLimits(), asyncio.get_running_loop().time())
    pump = SessionPump(session, lambda _: None, lambda: None)
    connection = DyingConnection()
    session.connected(ConnectionKeys(b"s" * 32, b"r" * 32), 0, asyncio.get_running_loop().time())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(pump.run(connection))
    pump.close()
    assert (session.state, connection.closed) == (SessionState.BROKEN, True)
