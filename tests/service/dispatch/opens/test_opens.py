"""Reservations, prompts and aborts in sessions: order, breaks, losses, deadlines, and workers that have calls alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.domain.worker import CAPABILITIES, SESSIONS
from baton.services.router.dispatch.reserve import ReserveLimits
from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.service.dispatch import dispatch_world
from tests.service.dispatch.dispatch_world import LIMITS, World, scripted, sequence, tokens, two_refreshes, world
from tests.service.dispatch.test_sessions import eventually, proxied, reset

pytestmark = pytest.mark.timeout(60)

FIRST = AttemptId(RequestId("r"), 1)
HOLDS_RESERVE = (ScriptedAction(Phase.RESERVE, Hold()),)
HOLDS_SEAL = (ScriptedAction(Phase.SEAL, Hold()),)


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_world, "uses_sessions", True)


def num_opens(w: World) -> list[int]:
    """What came to each worker in its sessions besides attempts of decode."""
    return [worker.in_sessions.num_opens for worker in w.cluster.workers]


async def test_an_attempt_takes_no_call_but_its_sessions():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=3),)]) as w:
        w.workers.decode_stub = w.workers.prefill_stub = None  # type: ignore[assignment]
        chunks = w.dispatcher.run(w.admit(sequence()))
        for _ in range(3):
            await anext(chunks)
        assert num_opens(w) == [1, 1]
        await chunks.aclose()
        assert await w.decode.aborted(FIRST) == await w.prefill.aborted(FIRST) == "cancelled"
        assert num_opens(w) == [2, 2]
        metadata = w.decode.metadata[0], w.prefill.metadata[0]
        assert [(one["baton-request-id"], one["x-request-id"]) for one in metadata] == [("r", "http-1")] * 2


async def test_a_reset_within_a_reservation_is_a_pause_and_no_attempt(wire: str):
    async with world(decode=[HOLDS_RESERVE]) as w, proxied(w, w.decode, wire) as proxy:
        run = asyncio.create_task(w.generate(sequence()))
        await w.decode.reached(Phase.RESERVE)
        await reset(proxy)
        w.decode.release()
        assert tokens(await run) == scripted(5)
        assert (len(w.decode.reservations), len(w.prefill.requests)) == (1, 1)


async def test_a_reset_within_a_prompt_is_a_pause_and_no_attempt(wire: str):
    async with world(prefill=[HOLDS_SEAL]) as w, proxied(w, w.prefill, wire) as proxy:
        run = asyncio.create_task(w.generate(sequence()))
        await w.prefill.reached(Phase.SEAL)
        await reset(proxy)
        w.prefill.release()
        assert tokens(await run) == scripted(5)
        assert [request.id.attempt for request in w.prefill.requests] == [1]
        assert "retry" not in w.timings.entries


@pytest.mark.usefixtures("both_streams")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_whose_session_is_lost_is_replaced(role: str, wire: str):
    held = [HOLDS_SEAL, ()] if role == "prefill" else [HOLDS_RESERVE, ()]
    async with world(**{role: held}) as w:  # type: ignore[arg-type]
        first, second = w.cluster.prefills if role == "prefill" else w.cluster.decodes
        await w.cluster.change_load(second, waiting_tokens=100, running_rows=4)  # second choice
        async with proxied(w, first, wire) as proxy:
            run = asyncio.create_task(w.generate(sequence()))
            await first.reached(Phase.SEAL if role == "prefill" else Phase.RESERVE)
            proxy.refuses = True
            proxy.reset()
            assert tokens(await run) == scripted(5)
            assert [request.id.attempt for request in second.requests] == [2]
            assert w.workers.suspicions.holds(first.incarnation, w.workers._now())


@pytest.mark.usefixtures("both_streams")
async def test_a_reservation_without_a_reply_is_aborted_in_time():
    limits = replace(LIMITS, reserve=ReserveLimits(reserve_timeout_s=0.3, worker_wait_s=0.3))
    async with world(decode=[HOLDS_RESERVE, ()], limits=limits) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # second choice
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert await first.aborted(FIRST) == "reserve unanswered"
        assert [request.id.attempt for request in second.requests] == [2]


async def test_an_abort_never_overtakes_what_it_ends(wire: str):
    """Of a request that is hung up while its reservation waits for a connection, nothing comes behind the abort."""
    async with world() as w, proxied(w, w.decode, wire) as proxy:
        proxy.refuses = True
        proxy.reset()
        run = asyncio.create_task(w.generate(sequence()))
        await w.prefill.reached(Phase.SEALED)  # it has begun beside the reservation
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        proxy.refuses = False
        assert await w.decode.aborted(FIRST) == "reserve unanswered"
        num_before = len(w.decode.reservations)
        assert tokens(await w.generate(sequence("next"))) == scripted(5)
        assert [one.id.request_id for one in w.decode.reservations[num_before:]] == ["next"]


async def test_a_worker_without_opens_in_sessions_keeps_its_calls():
    async with world() as w:
        for worker in w.cluster.workers:
            worker.capabilities = (*CAPABILITIES, SESSIONS)
        await w.cluster.announce()
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert (num_opens(w), w.decode.num_in_sessions) == ([0, 0], 1)


async def test_an_abort_for_a_session_that_has_ended_is_a_call():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=3),)]) as w:
        chunks = w.dispatcher.run(w.admit(sequence()))
        for _ in range(3):
            await anext(chunks)
        before, sessions = num_opens(w), w.workers.worker_sessions
        assert sessions is not None
        await sessions.close()
        await chunks.aclose()
        assert await w.decode.aborted(FIRST) == await w.prefill.aborted(FIRST) == "cancelled"
        assert num_opens(w) == before
        await eventually(lambda: w.decode.num_generating == 0)
