"""Prefill starts beside the reservation: the saved round trip, and refusal, loss or cancel on either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.domain.errors import Broken, Draining, WorkerLost
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason
from baton.rpc.gen import decode_pb2, prefill_pb2
from baton.services.router.dispatch.prefill import early_start
from baton.services.router.dispatch.reserve import ReserveLimits
from baton.services.router.generation import AdmittedRequest, TokenChunk
from baton.telemetry.metrics import EARLY_PREFILLS_TOTAL
from tests.mock_workers import Busy, Crash, Fail, Hold, MockDecode, MockPrefill, Phase, ScriptedAction
from tests.service.dispatch.dispatch_world import (
    LIMITS,
    PROMPT,
    World,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("both_streams")]

FIRST = AttemptId(RequestId("r"), 1)
HELD = (ScriptedAction(Phase.RESERVE, Hold()),)
BUSY = (ScriptedAction(Phase.RESERVE, Busy(60.0)),)


def num_early(outcome: str) -> float:
    return EARLY_PREFILLS_TOTAL.labels(outcome).value


class CountingDecode(MockDecode):
    """Counts its answers to `Reserve`."""

    num_answers = 0

    async def Reserve(  # gRPC's name
        self, message: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveReply:
        reply = await super().Reserve(message, context)
        self.num_answers += 1
        return reply


class WatchingPrefill(MockPrefill):
    """Notes how many answers decode had given when a prompt came."""

    def __init__(self, id: str, decode: CountingDecode) -> None:
        super().__init__(id)
        self.decode = decode
        self.num_answers: list[int] = []

    async def Prefill(  # gRPC's name
        self, message: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.num_answers.append(self.decode.num_answers)
        async for event in super().Prefill(message, context):
            yield event


@pytest.mark.parametrize(("available_pages", "num_round_trips"), [(64, 0), (6, 0), (5, 1)])
async def test_no_round_trip_precedes_prefill_where_room_is_known(available_pages, num_round_trips):
    decode = CountingDecode("decode-9", HELD if num_round_trips == 0 else ())
    prefill = WatchingPrefill("prefill-9", decode)
    async with world([], []) as w:
        w.cluster.prefills.append(prefill)
        w.cluster.decodes.append(decode)
        await w.cluster.start()
        await w.cluster.change_load(decode, available_pages=available_pages)  # the prompt needs three, twice
        await two_refreshes(w)
        run = asyncio.create_task(w.generate(sequence()))
        await prefill.reached(Phase.SEALED)
        decode.release()
        assert tokens(await run) == scripted(5)
        assert (prefill.num_answers, decode.num_answers) == ([num_round_trips], 1)


class CountedPrefill(MockPrefill):
    """Notes how many prompts were about to come behind each."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.num_coming: list[int] = []

    async def Prefill(  # gRPC's name
        self, message: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.num_coming.append(message.num_coming)
        async for event in super().Prefill(message, context):
            yield event


async def test_prefill_is_told_how_many_prompts_are_about_to_be_sent():
    prefill = CountedPrefill("prefill-9")
    async with world([], []) as w:
        w.cluster.prefills.append(prefill)
        w.cluster.decodes.append(MockDecode("decode-9"))
        await w.cluster.start()
        await two_refreshes(w)

        async def consume(admitted: AdmittedRequest) -> None:
            async for _ in w.dispatcher.run(admitted):
                pass

        await asyncio.gather(*[consume(one) for one in [w.admit(sequence(name, prompt=(*PROMPT,))) for name in "abc"]])
        assert sorted(prefill.num_coming) == [0, 1, 2]
        released = w.admit(sequence("d"))
        w.dispatcher.release(released)
        await consume(w.admit(sequence("e")))
        assert prefill.num_coming[3:] == [0]


@pytest.mark.parametrize(("is_busy", "num_coming"), [(False, [2, 1, 0]), (True, [0, 0, 0])])
async def test_the_first_of_a_burst_is_sent_once_the_others_have_slots(is_busy: bool, num_coming: list[int]):
    """Of a burst that comes while another request is here, none waits."""
    prefill, decode = CountedPrefill("prefill-9"), MockDecode("decode-9", HELD if is_busy else ())
    async with world([], []) as w:
        w.cluster.prefills.append(prefill)
        w.cluster.decodes.append(decode)
        await w.cluster.start()
        await two_refreshes(w)

        async def send(name: str) -> None:
            async for _ in w.dispatcher.run(w.admit(sequence(name, prompt=(*PROMPT,)))):
                pass

        before = [asyncio.create_task(send("before"))] if is_busy else []
        if is_busy:
            await prefill.reached(Phase.SEALED)
        tasks = [*before, *(asyncio.create_task(send(name)) for name in "abc")]
        decode.release()
        await asyncio.gather(*tasks)
        assert sorted(prefill.num_coming[len(before) :], reverse=True) == num_coming


async def test_no_token_comes_before_the_reservation():
    async with world(decode=[HELD]) as w:
        seen: list[TokenChunk] = []

        async def consume() -> None:
            async for chunk in w.dispatcher.run(w.admit(sequence(max_tokens=3))):
                seen.append(chunk)

        run = asyncio.create_task(consume())
        await w.prefill.reached(Phase.SEALED)
        await asyncio.sleep(0)
        assert (seen, w.decode.generates) == ([], [])
        w.decode.release()
        await run
        assert tokens(seen) == scripted(3)
        assert [message.reservation_id for message in w.decode.generates] == ["decode-0-1"]
        assert w.timings.entries.index("reserve") < w.timings.entries.index("dispatch")


async def test_another_decode_worker_takes_what_prefill_has_begun():
    before = num_early("reserved")
    async with world([(), ()], [BUSY, ()]) as w:
        await w.cluster.change_load(w.cluster.decodes[1], running_rows=4)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        begun = [worker for worker in w.cluster.prefills if worker.requests]
        assert [[request.id for request in worker.requests] for worker in begun] == [[FIRST]]
        assert [message.prefill_id for message in w.cluster.decodes[1].generates] == [begun[0].id]
        assert begun[0].aborts == []
    assert num_early("reserved") - before == 1


async def test_without_room_prefill_is_aborted_and_the_next_reserves_first():
    before = num_early("no_room")
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Busy(), times=3),)]) as w:
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert await w.prefill.aborted(FIRST) == "no_room"
        assert [promise.id.attempt for promise in w.decode.reservations] == [1, 2, 2, 2]
        assert [request.id.attempt for request in w.prefill.requests] in ([1, 2], [2])  # the abort may pass the call
        assert w.timings.timers[0].trace(0.0).num_attempts == 2
    assert num_early("no_room") - before == 1


async def test_nobody_starts_early_while_another_waits_for_room():
    busy = ScriptedAction(Phase.RESERVE, Busy(60.0), times=9)
    async with world(decode=[(busy,)]) as w:
        first = asyncio.create_task(w.generate(sequence("a")))
        await w.decode.reached(Phase.RESERVE, times=2)
        await until(w, lambda: bool(w.dispatcher._reserver._wait_queues))
        second = asyncio.create_task(w.generate(sequence("b")))
        await w.decode.reached(Phase.RESERVE, times=3)
        await two_refreshes(w)
        assert not any(request.id.request_id == "b" for request in w.prefill.requests)
        for run in (first, second):
            run.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


@pytest.mark.parametrize("code", ["draining", "link_broken"])
async def test_a_prefill_that_refuses_frees_the_reservation(code):
    refuses = (ScriptedAction(Phase.ACCEPT, Fail(code)),)
    async with world([refuses, refuses], [()]) as w:
        for worker in w.cluster.prefills[1:]:
            worker.script.clear()
        await w.cluster.change_load(w.cluster.prefills[1], waiting_tokens=10_000)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        await w.decode.aborted(FIRST)
        assert [promise.id.attempt for promise in w.decode.reservations] == [1, 2]


async def test_a_prefill_that_failed_is_not_given_to_another_decode_worker():
    class LateBusy(MockDecode):
        async def Reserve(  # gRPC's name
            self, message: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
        ) -> decode_pb2.ReserveReply:
            self.reservations.append(message)
            if message.id.attempt == 1:
                await self._run_action(Phase.RESERVE)  # holds it
                return decode_pb2.ReserveReply(busy=decode_pb2.Busy(retry_after_s=60.0))
            self.reservations.pop()
            return await super().Reserve(message, context)

    late = LateBusy("decode-9", HELD)
    async with world([(ScriptedAction(Phase.ACCEPT, Fail("link_broken")),), ()], [()]) as w:
        w.cluster.decodes.insert(0, late)
        await late.start()
        await w.cluster.change_load(w.cluster.decodes[1], running_rows=4)
        await w.cluster.change_load(w.cluster.prefills[1], waiting_tokens=10_000)
        await two_refreshes(w)
        run = asyncio.create_task(w.generate(sequence()))
        await w.prefill.reached(Phase.ACCEPT)
        await until(w, lambda: not any(task.get_name().startswith("prefill-r") for task in asyncio.all_tasks()))
        late.release()
        assert tokens(await run) == scripted(5)
        assert {promise.id.attempt for promise in w.cluster.decodes[1].reservations} == {2}
        assert [attempt.end_code for attempt in w.timings.timers[0].trace(0.0).attempts] == ["link_broken", ""]


async def until(w: World, condition: Callable[[], bool]) -> None:
    """Waits until a read of the registry finds `condition`."""
    async with asyncio.timeout(5):
        while not condition():
            await w.workers.wait_for_change()


async def test_a_cancel_beside_the_reservation_reaches_both_workers():
    async with world([(ScriptedAction(Phase.SEAL, Hold()),)], [HELD]) as w:
        run = asyncio.create_task(w.generate(sequence()))
        await w.prefill.reached(Phase.SEAL)
        await w.decode.reached(Phase.RESERVE)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert await w.prefill.aborted(FIRST) == "cancelled"
        await w.decode.aborted(FIRST)
        assert await w.state(sequence()) is RequestState.CANCELLED


async def test_a_lost_reservation_ends_the_prefill():
    short = replace(LIMITS, reserve=ReserveLimits(reserve_timeout_s=2.0, worker_wait_s=0.1))
    async with world([(ScriptedAction(Phase.SEAL, Hold()),)], [(ScriptedAction(Phase.RESERVE, Crash()),)], short) as w:
        with pytest.raises(WorkerLost):
            await w.generate(sequence())
        assert await w.prefill.aborted(FIRST) == "worker_lost"


@pytest.mark.parametrize("code", [Draining.code, Broken.code])
async def test_a_prefill_that_failed_beside_a_lost_reservation_is_avoided(code):
    """Both workers of a pair fail at once, as on a host that is stopped: neither gets the next attempt."""

    class LostDecode(MockDecode):
        async def Reserve(  # gRPC's name
            self, message: decode_pb2.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]
        ) -> decode_pb2.ReserveReply:
            await self._run_action(Phase.RESERVE)  # holds it
            await context.abort(grpc.StatusCode.UNAVAILABLE, "stopped")

    lost = LostDecode("decode-9", HELD)
    async with world([(ScriptedAction(Phase.ACCEPT, Fail(code), times=9),), ()], [()]) as w:
        w.cluster.decodes.insert(0, lost)
        await lost.start()
        await w.cluster.change_load(w.cluster.decodes[1], running_rows=4)
        await w.cluster.change_load(w.cluster.prefills[1], waiting_tokens=200)
        await two_refreshes(w)
        run = asyncio.create_task(w.generate(sequence()))
        await w.prefill.reached(Phase.ACCEPT)
        await until(w, lambda: not any(task.get_name().startswith("prefill-r") for task in asyncio.all_tasks()))
        lost.release()
        assert tokens(await run) == scripted(5)
        assert len(w.timings.timers[0].trace(0.0).attempts) == 2
        assert [request.id.attempt for request in w.cluster.prefills[1].requests] == [2]


async def test_a_decode_worker_that_hangs_gets_no_more_prompts_begun(monkeypatch):
    monkeypatch.setattr(early_start, "MAX_SILENCE_S", 0.0)
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Hold(), times=2),)]) as w:
        first = asyncio.create_task(w.generate(sequence("a")))
        await w.decode.reached(Phase.RESERVE)
        await w.prefill.reached(Phase.SEALED)
        second = asyncio.create_task(w.generate(sequence("b")))
        await w.decode.reached(Phase.RESERVE, times=2)
        await two_refreshes(w)
        assert {request.id.request_id for request in w.prefill.requests} == {"a"}
        w.decode.release()
        assert [tokens(await run) for run in (first, second)] == [scripted(5)] * 2


async def test_a_sequence_that_ends_with_its_first_token_reserves_nothing():
    async with world() as w:
        chunks = await w.generate(sequence(max_tokens=1))
        assert (tokens(chunks), chunks[-1].finish) == (scripted(1), FinishReason.LENGTH)
        assert w.decode.reservations == []
