"""The timer of a session on the loop that services run on."""

from __future__ import annotations

import asyncio

import uvloop

from baton.session.lifecycle import SessionState
from baton.session.pump import SessionPump
from baton.session.session import WORKER_KINDS, MessageSession, SessionLimits

DEADLINE_S = 5.0


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
