"""The dispatcher with mock workers over real gRPC: a normal run, and cancellation in every phase."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest
from structlog.testing import capture_logs

from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason
from baton.kv.keys import page_keys
from baton.rpc.request_metadata import ATTEMPT_KEY, HTTP_REQUEST_ID_KEY, REQUEST_ID_KEY, TRACEPARENT_KEY
from baton.services.router.generation import TokenChunk
from tests.mock_workers import (
    PAGE_SIZE,
    Busy,
    Crash,
    Fail,
    Hold,
    Phase,
    ScriptedAction,
)
from tests.service.dispatch.dispatch_world import (
    CONTEXT,
    ONE_AT_A_TIME,
    PROMPT,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("both_streams")]


async def test_tokens_arrive_in_order_and_every_stage_is_stamped():
    async with world() as w:
        chunks = await w.generate(sequence())
        assert tokens(chunks) == scripted(5)
        assert [chunk.finish for chunk in chunks] == [None] * 4 + [FinishReason.LENGTH]
        assert w.timings.entries == ["admit", "reserve", "dispatch", "prefill", "import"]
        assert await w.state(sequence()) is RequestState.FINISHED
        assert w.prefill.aborts == w.decode.aborts == []


async def test_reserve_prefill_and_generate_carry_the_request():
    async with world() as w:
        w.decode.decode_prefix_len = 8
        chunks = await w.generate(sequence())
        promise, generate = w.decode.reservations[0], w.decode.generates[0]
        assert list(promise.page_keys) == page_keys(PROMPT, PAGE_SIZE, "")
        assert promise.num_tokens == len(PROMPT)
        assert promise.max_new_tokens == sequence().stop.max_tokens
        assert generate.reservation_id == "decode-0-1"
        assert (generate.prefill_id, generate.prefill_incarnation) == (w.prefill.id, w.prefill.incarnation)
        assert w.prefill.requests == w.decode.requests
        assert w.prefill.requests[0].id == AttemptId(RequestId("r"), 1)
        assert {chunk.num_cached_tokens for chunk in chunks} == {8}


async def test_every_call_of_an_attempt_carries_its_ids():
    async with world() as w:
        await w.generate(sequence())
        ids = {
            REQUEST_ID_KEY: "r",
            ATTEMPT_KEY: "1",
            HTTP_REQUEST_ID_KEY: CONTEXT.http_request_id,
            TRACEPARENT_KEY: CONTEXT.traceparent,
        }
        received = [*w.prefill.metadata, *w.decode.metadata]
        assert len(received) == 3  # Prefill, Reserve and Generate
        assert [{key: metadata.get(key) for key in ids} for metadata in received] == [ids] * 3


async def test_every_transition_is_logged_with_the_request_and_attempt():
    with capture_logs() as lines:
        async with world() as w:
            await w.generate(sequence())
    transitions = [line for line in lines if line["event"] == "request_state"]
    assert {(line["request_id"], line["attempt"]) for line in transitions} == {("r", 1)}
    states = ["queued", "reserved", "prefilling", "sealed", "decoding", "finished"]
    assert [line["state"] for line in transitions] == states


async def test_the_timer_gets_the_times_of_both_workers():
    async with world() as w:
        admitted = w.admit(sequence())
        chunks = [chunk async for chunk in w.dispatcher.run(admitted)]
        assert len(chunks) == 5
        [attempt] = w.timings.timers[0].trace(time.monotonic()).attempts
        assert (attempt.prefill, attempt.decode, attempt.path) == ("prefill-0", "decode-0", "split")
        assert attempt.import_times is not None
        assert attempt.import_times.pages == 1


async def test_one_token_needs_no_decode_worker():
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Busy(), times=99),)]) as w:
        chunks = await w.generate(sequence(max_tokens=1))
        assert tokens(chunks) == scripted(1)
        assert chunks[0].finish is FinishReason.LENGTH
        assert await w.prefill.aborted(AttemptId(RequestId("r"), 1)) == "finished"  # unpins its pages
        assert await w.state(sequence()) is RequestState.FINISHED
        assert (w.decode.reservations, w.decode.requests, w.decode.aborts) == ([], [], [])


async def test_the_last_token_of_a_retried_sequence_needs_no_decode_worker():
    async with world(decode=[(ScriptedAction(Phase.DECODE, Fail("link_broken"), index=2),)]) as w:
        assert tokens(await w.generate(sequence(max_tokens=3))) == scripted(3)
        assert [request.id.attempt for request in w.decode.requests] == [1]
        assert [request.num_emitted for request in w.prefill.requests] == [0, 2]


async def test_a_prefill_worker_lost_before_its_only_token_is_replaced():
    async with world(prefill=[(ScriptedAction(Phase.SEAL, Crash()),), ()]) as w:
        await w.cluster.change_load(w.cluster.prefills[1], waiting_tokens=100)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence(max_tokens=1))) == scripted(1)
        assert w.decode.requests == []


async def test_a_restarted_prefill_worker_computes_no_token_for_its_predecessor():
    """It may have other weights, and no decode worker compares them when no page moves."""
    async with world(prefill=[(), ()]) as w:
        restarted, other = w.cluster.prefills
        await w.cluster.change_load(other, waiting_tokens=100)
        await two_refreshes(w)
        restarted.change_incarnation()
        assert tokens(await w.generate(sequence(max_tokens=1))) == scripted(1)
        assert restarted.requests == []
        assert [request.id.attempt for request in other.requests] == [2]


@pytest.mark.parametrize(
    ("prefill", "decode", "num_before"),
    [
        pytest.param((), (ScriptedAction(Phase.RESERVE, Hold()),), 0, id="reserving"),
        pytest.param(
            (ScriptedAction(Phase.ACCEPT, Hold()),), (ScriptedAction(Phase.IMPORT, Hold()),), 0, id="not yet accepted"
        ),
        pytest.param(
            (ScriptedAction(Phase.SEAL, Hold()),), (ScriptedAction(Phase.IMPORT, Hold()),), 0, id="prefilling"
        ),
        pytest.param((), (ScriptedAction(Phase.IMPORT, Hold()),), 1, id="sealed"),
        pytest.param((), (ScriptedAction(Phase.DECODE, Hold(), index=3),), 3, id="decoding"),
    ],
)
async def test_a_cancelled_request_is_aborted_within_a_second(prefill, decode, num_before):
    async with world([prefill], [decode]) as w:
        seen: list[TokenChunk] = []
        ready = asyncio.Event()

        async def consume() -> None:
            async with aclosing(w.dispatcher.run(w.admit(sequence()))) as chunks:
                if num_before == 0:
                    ready.set()
                async for chunk in chunks:
                    seen.append(chunk)
                    if len(seen) == num_before:
                        ready.set()

        client = asyncio.create_task(consume())
        async with asyncio.timeout(5):
            await ready.wait()
        held = (*prefill, *decode)[0]
        worker = w.prefill if prefill else w.decode
        await worker.reached(held.phase, times=3 if held.index else 1)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        id = AttemptId(RequestId("r"), 1)
        await w.decode.aborted(id, within_s=10.0)
        if held.phase is not Phase.RESERVE:
            assert await w.prefill.aborted(id, within_s=10.0) == "cancelled"
        assert tokens(seen) == scripted(num_before)
        assert await w.state(sequence()) is RequestState.CANCELLED


async def test_closing_the_generator_between_two_tokens_aborts_too():
    async with world() as w:
        chunks = w.dispatcher.run(w.admit(sequence()))
        assert tokens([await anext(chunks), await anext(chunks)]) == scripted(2)
        await chunks.aclose()
        for worker in (w.prefill, w.decode):
            assert await worker.aborted(AttemptId(RequestId("r"), 1), within_s=10.0) == "cancelled"


async def test_a_request_leaves_its_slot_before_its_client_has_read():
    async with world() as w:
        chunks = w.dispatcher.run(w.admit(sequence()))
        while (await anext(chunks)).finish is None:
            assert w.dispatcher.admission_queue.num_running == 1
        assert (w.dispatcher.admission_queue.num_running, w.dispatcher.num_open) == (0, 1)
        await chunks.aclose()


async def test_a_request_cancelled_in_the_queue_never_reaches_a_worker():
    async with world(
        [(ScriptedAction(Phase.SEAL, Hold()),)], [(ScriptedAction(Phase.IMPORT, Hold()),)], limits=ONE_AT_A_TIME
    ) as w:
        first = asyncio.create_task(w.generate(sequence("first")))
        await w.prefill.reached(Phase.SEAL)
        await w.decode.reached(Phase.IMPORT)  # its prompt may have begun before
        second = asyncio.create_task(w.generate(sequence("second")))
        third = w.admit(sequence("third", prompt=(1, 2)))
        second.cancel()
        w.dispatcher.release(third)
        w.dispatcher.release(third)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert [promise.id.request_id for promise in w.decode.reservations] == ["first"]
        assert await w.state(sequence("third")) is RequestState.CANCELLED
