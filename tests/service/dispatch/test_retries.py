"""Retries after every kind of failed attempt."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from baton.domain.errors import (
    ContextOverflow,
    DeadlineExceeded,
    Interrupted,
    LinkBroken,
    Superseded,
    WorkerLost,
)
from baton.domain.ids import AttemptId, RequestId, new_incarnation
from baton.domain.lifecycle import RequestState
from baton.services.router.dispatch.reserve import ReserveLimits
from baton.telemetry.request_trace import Stage
from tests.lateness import in_time
from tests.mock_workers import (
    Busy,
    Crash,
    Fail,
    Hold,
    MockDecode,
    Phase,
    ScriptedAction,
    Skip,
    token_at,
)
from tests.service.dispatch.dispatch_world import (
    LIMITS,
    PROMPT,
    WORKER_LIMITS,
    World,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("both_streams")]


async def test_a_decode_worker_lost_while_decoding_is_replaced_seamlessly():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=3),), ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # second choice
        await two_refreshes(w)
        chunks = w.dispatcher.run(w.admit(sequence(max_tokens=7)))
        seen = [await anext(chunks) for _ in range(3)]
        await first.stop()
        seen += [chunk async for chunk in chunks]
        assert tokens(seen) == scripted(7)
        replay = second.requests[0]
        assert replay.id == AttemptId(RequestId("r"), 2)
        assert replay.tokens == (*PROMPT, token_at(0), token_at(1), token_at(2))
        assert replay.num_prompt_tokens == len(PROMPT)
        assert w.timings.entries.count("retry") == 1
        assert await w.prefill.aborted(AttemptId(RequestId("r"), 1)) == "worker_lost"
        assert await w.state(sequence()) is RequestState.FINISHED


async def test_a_prefill_worker_lost_before_the_seal_is_replaced():
    async with world(prefill=[(ScriptedAction(Phase.SEAL, Crash()),), ()]) as w:
        await w.cluster.change_load(w.cluster.prefills[1], waiting_tokens=100)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert w.cluster.prefills[1].requests[0].id.attempt == 2
        assert await w.decode.aborted(AttemptId(RequestId("r"), 1)) == "worker_lost"


async def test_a_prefill_worker_lost_after_the_seal_does_not_matter():
    async with world(
        [(ScriptedAction(Phase.SEALED, Crash()),)], [(ScriptedAction(Phase.DECODE, Hold(), index=1),)]
    ) as w:
        run = w.dispatcher.run(w.admit(sequence()))
        first = await anext(run)  # the router has the seal; sent would not be enough
        await w.decode.reached(Phase.DECODE)
        await w.prefill.stop()
        w.prefill.incarnation = new_incarnation()  # it is even known to be gone
        await w.cluster.announce()
        await two_refreshes(w)
        w.decode.release()
        assert tokens([first, *[chunk async for chunk in run]]) == scripted(5)
        assert len(w.decode.requests) == len(w.prefill.requests) == 1


@pytest.mark.parametrize("code", ["link_broken", "lease_ended", "integrity_failure", "sent_back", "worker_lost", "odd"])
async def test_a_failure_reported_by_decode_is_retried(code):
    async with world(decode=[(ScriptedAction(Phase.DECODE, Fail(code), index=2),)]) as w:
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert [request.id.attempt for request in w.decode.requests] == [1, 2]


@pytest.mark.parametrize("code", ["sent_back", "link_broken"])
async def test_a_retry_avoids_what_failed(code):
    async with world(decode=[(ScriptedAction(Phase.DECODE, Fail(code), index=2),), ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # otherwise second choice
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert [len(decode.requests) for decode in (first, second)] == [1, 1]


async def test_a_worker_stuck_in_a_step_loses_its_attempts():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=2),), ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)
        await two_refreshes(w)
        run = asyncio.create_task(w.generate(sequence()))
        await first.reached(Phase.DECODE, times=2)
        await w.cluster.change_load(first, step_age_s=31.0)
        assert tokens(await run) == scripted(5)
        assert await first.aborted(AttemptId(RequestId("r"), 1)) == "worker_lost"
        assert second.requests[0].id.attempt == 2


async def test_a_gap_in_token_indices_never_reaches_the_client():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Skip(), index=2),)]) as w:
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert await w.decode.aborted(AttemptId(RequestId("r"), 1)) == "integrity_failure"


async def test_attempts_are_bounded_and_the_last_error_is_raised():
    async with world(decode=[(ScriptedAction(Phase.IMPORT, Fail("link_broken"), times=9),)]) as w:
        with pytest.raises(Interrupted) as failure:
            await w.generate(sequence())
        assert failure.value.code == "link_broken"
        assert [request.id.attempt for request in w.decode.requests] == [1, 2, 3]
        assert await w.state(sequence()) is RequestState.FAILED


async def test_a_superseded_attempt_is_not_retried():
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Fail("superseded")),)]) as w:
        with pytest.raises(Superseded):
            await w.generate(sequence())
        assert len(w.decode.reservations) == 1


async def test_a_busy_worker_is_tried_until_it_has_room():
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Busy(), times=3),)]) as w:
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert [promise.id.attempt for promise in w.decode.reservations] == [1, 2, 2, 2]


async def test_a_busy_worker_sends_the_attempt_to_another():
    scripts = [(ScriptedAction(Phase.RESERVE, Busy(60.0)),), (ScriptedAction(Phase.RESERVE, Busy(60.0)),)]
    async with world(decode=scripts) as w:
        first, second = w.cluster.decodes
        run = asyncio.create_task(w.generate(sequence()))
        await first.reached(Phase.RESERVE)
        await second.reached(Phase.RESERVE)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert len(first.reservations) == len(second.reservations) == 1


async def test_a_draining_decode_worker_is_not_tried_again():
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Fail("draining"), times=9),), ()]) as w:
        for name in ("a", "b"):
            assert tokens(await w.generate(sequence(name))) == scripted(5)
        assert len(w.cluster.decodes[1].requests) == 2


async def test_a_lost_reply_to_reserve_counts_as_an_attempt():
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Crash()),), ()]) as w:
        await w.cluster.change_load(w.cluster.decodes[1], running_rows=4)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert w.cluster.decodes[1].requests[0].id.attempt == 2
        assert await w.state(sequence()) is RequestState.FINISHED


@pytest.mark.parametrize("phase", [Phase.RESERVE, Phase.ACCEPT])
async def test_workers_that_die_before_they_have_the_request_do_not_count(phase: Phase):
    """More of them than attempts are allowed."""
    num_dead = LIMITS.max_attempts + 1
    scripts = [*((ScriptedAction(phase, Crash()),) for _ in range(num_dead)), ()]
    patient = replace(LIMITS, reserve=ReserveLimits(reserve_timeout_s=2.0, worker_wait_s=30.0))
    idle: list[tuple[ScriptedAction, ...]] = [()]
    prefill, decode = (idle, scripts) if phase is Phase.RESERVE else (scripts, idle)
    async with world(prefill=prefill, decode=decode, limits=patient) as w:
        survivor = (w.cluster.decodes if phase is Phase.RESERVE else w.cluster.prefills)[-1]
        await w.cluster.change_load(survivor, running_rows=7, waiting_tokens=1000)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert survivor.requests[0].id.attempt == num_dead + 1


async def test_a_registered_worker_that_is_gone_is_not_awaited_for_ever():
    """Nobody registers it off: it may be cut off from this router only."""
    async with world() as w:
        await w.prefill.stop()
        began = time.monotonic()
        with pytest.raises(WorkerLost):
            await w.generate(sequence(deadline_s=120.0))
        in_time(time.monotonic() - began, 60.0, "the request ends")


async def test_workers_that_die_with_the_request_count():
    """The request may have killed them."""
    scripts = [(ScriptedAction(Phase.SEAL, Crash()),) for _ in range(LIMITS.max_attempts + 1)]
    async with world(prefill=scripts) as w:
        with pytest.raises(WorkerLost):
            await w.generate(sequence())
        assert sum(len(prefill.requests) for prefill in w.cluster.prefills) == LIMITS.max_attempts


async def test_a_restarted_worker_ends_its_earlier_attempts():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=2),)]) as w:
        run = asyncio.create_task(w.generate(sequence()))
        await w.decode.reached(Phase.DECODE, times=2)
        w.decode.change_incarnation()
        await w.cluster.announce()
        assert tokens(await run) == scripted(5)
        assert [request.id.attempt for request in w.decode.requests] == [1, 2]


async def test_a_worker_restarted_during_reserve_is_tried_again():
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Hold()),)]) as w:
        run = asyncio.create_task(w.generate(sequence()))
        await w.decode.reached(Phase.RESERVE)
        w.decode.change_incarnation()
        await w.cluster.announce()
        assert tokens(await run) == scripted(5)
        assert [promise.id.attempt for promise in w.decode.reservations] == [1, 2]


async def test_before_the_first_token_the_wait_for_a_worker_is_bounded():
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Crash()),)]) as w:
        with pytest.raises(WorkerLost):
            await w.generate(sequence())
        assert await w.state(sequence()) is RequestState.FAILED


async def test_after_the_first_token_workers_are_awaited_until_the_deadline():
    short_wait = replace(LIMITS, reserve=ReserveLimits(reserve_timeout_s=2.0, worker_wait_s=0.0))
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=2),)], limits=short_wait) as w:
        run = asyncio.create_task(w.generate(sequence(deadline_s=1.0)))
        await w.decode.reached(Phase.DECODE, times=2)
        await _sealed(w)
        await w.decode.stop()
        with pytest.raises(DeadlineExceeded):
            await run
        assert "retry" in w.timings.entries
        assert await w.state(sequence()) is RequestState.FAILED


async def test_a_token_from_decode_resets_the_count_of_failures():
    breaks = [ScriptedAction(Phase.DECODE, Fail("link_broken"), index=index) for index in (2, 4, 6, 8, 10)]
    assert len(breaks) > LIMITS.max_attempts
    async with world(decode=[breaks]) as w:
        assert tokens(await w.generate(sequence(max_tokens=12))) == scripted(12)
        assert await w.state(sequence()) is RequestState.FINISHED


async def test_a_sealed_token_does_not_reset_the_count_of_failures():
    """The token of prefill at each attempt does not prove that decode survives the request."""
    breaks = [ScriptedAction(Phase.IMPORT, Fail("link_broken"), times=LIMITS.max_attempts)]
    async with world(decode=[breaks]) as w:
        with pytest.raises(LinkBroken):
            await w.generate(sequence(max_tokens=12))
        assert len(w.decode.requests) == LIMITS.max_attempts


async def test_a_worker_that_comes_back_in_time_continues_the_request():
    short_wait = replace(LIMITS, reserve=ReserveLimits(reserve_timeout_s=2.0, worker_wait_s=0.0))
    async with world(decode=[(ScriptedAction(Phase.DECODE, Hold(), index=2),)], limits=short_wait) as w:
        run = asyncio.create_task(w.generate(sequence()))
        await w.decode.reached(Phase.DECODE, times=2)
        await _sealed(w)
        await w.decode.stop()
        await w.prefill.aborted(AttemptId(RequestId("r"), 1))
        newcomer = MockDecode("decode-9")
        w.cluster.decodes.append(newcomer)
        await newcomer.start()
        await w.cluster.announce()
        assert tokens(await run) == scripted(5)
        assert newcomer.requests[0].id.attempt == 2


async def _sealed(w: World) -> None:
    """Waits until the router has the sealed token."""
    async with asyncio.timeout(5):
        while Stage.PREFILL.value not in w.timings.entries:
            await w.workers.wait_for_change()


@pytest.mark.parametrize("code", ["draining", "overloaded"])
async def test_a_refusal_by_the_only_worker_costs_no_attempt(code):
    """The worker gets a pause instead of every remaining attempt at once."""
    num_times = LIMITS.max_attempts + 1
    quick = replace(WORKER_LIMITS, worker_ttl_s=0.1)
    async with world(prefill=[(ScriptedAction(Phase.ACCEPT, Fail(code), times=num_times),)], worker_limits=quick) as w:
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert [request.id.attempt for request in w.prefill.requests] == list(range(1, num_times + 2))
        assert w.timings.entries.count("retry") == num_times


async def test_a_row_that_is_sent_back_costs_no_attempt():
    ends = [ScriptedAction(Phase.DECODE, Fail("sent_back"), index=index) for index in (1, 3, 5, 7)]
    async with world(decode=[ends]) as w:
        assert tokens(await w.generate(sequence(max_tokens=9))) == scripted(9)
        assert [request.id.attempt for request in w.decode.requests] == [1, 2, 3, 4, 5]
        assert await w.state(sequence()) is RequestState.FINISHED


@pytest.mark.parametrize("code", ["invalid_request", "context_length_exceeded", "deadline_exceeded"])
async def test_a_refusal_that_is_not_confirmed_is_retried(code):
    refusals = [(ScriptedAction(phase, Fail(code)),) for phase in (Phase.RESERVE, Phase.IMPORT)]
    for script in refusals:
        async with world(decode=[script]) as w:
            assert tokens(await w.generate(sequence())) == scripted(5)
    async with world(prefill=[(ScriptedAction(Phase.SEAL, Fail(code)),)]) as w:
        assert tokens(await w.generate(sequence())) == scripted(5)


async def test_a_confirmed_refusal_ends_the_request_with_its_own_error():
    async with world(decode=[(ScriptedAction(Phase.IMPORT, Fail("context_length_exceeded"), times=9),)]) as w:
        with pytest.raises(ContextOverflow):
            await w.generate(sequence())
        assert len(w.decode.requests) == 2
