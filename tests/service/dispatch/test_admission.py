"""Admission by the dispatcher: deadlines, bounds, missing workers, drain, and placement."""

from __future__ import annotations

import asyncio

import pytest

from baton.domain.errors import (
    Broken,
    ContextOverflow,
    DeadlineExceeded,
    Draining,
    NoWorkers,
    Overloaded,
)
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason
from baton.domain.worker import WorkerStatus
from tests.mock_workers import (
    Busy,
    Hold,
    Phase,
    ScriptedAction,
)
from tests.service.dispatch.dispatch_world import (
    ONE_AT_A_TIME,
    consume,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("both_streams")]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param((), (ScriptedAction(Phase.RESERVE, Busy(), times=10_000),), id="no room"),
        pytest.param((), (ScriptedAction(Phase.RESERVE, Busy(60.0), times=10_000),), id="no room for long"),
        pytest.param((), (ScriptedAction(Phase.RESERVE, Hold()),), id="reserve unanswered"),
        pytest.param((ScriptedAction(Phase.SEAL, Hold()),), (), id="prefilling"),
        pytest.param((), (ScriptedAction(Phase.DECODE, Hold(), index=2),), id="decoding"),
    ],
)
async def test_the_deadline_ends_a_request_in_any_phase(prefill, decode):
    async with world([prefill], [decode]) as w:
        with pytest.raises(DeadlineExceeded):
            await w.generate(sequence(deadline_s=0.3))
        assert await w.state(sequence()) is RequestState.FAILED


async def test_the_deadline_counts_in_the_queue_as_well():
    async with world([(ScriptedAction(Phase.SEAL, Hold()),)], limits=ONE_AT_A_TIME) as w:
        first = asyncio.create_task(w.generate(sequence("first")))
        await w.prefill.reached(Phase.SEAL)
        with pytest.raises(DeadlineExceeded):
            await w.generate(sequence("second", deadline_s=1.0))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_the_queue_is_served_in_order_and_bounded():
    async with world([(ScriptedAction(Phase.SEAL, Hold()),)], limits=ONE_AT_A_TIME) as w:
        first = asyncio.create_task(w.generate(sequence("first")))
        await w.prefill.reached(Phase.SEAL)
        queued = [w.admit(sequence(name)) for name in ("second", "third")]
        with pytest.raises(Overloaded) as refusal:
            w.admit(sequence("fourth"))
        assert refusal.value.retry_after_s is not None
        runs = [asyncio.create_task(consume(w.dispatcher.run(admitted))) for admitted in reversed(queued)]
        first.cancel()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 2
        assert [request.id.request_id for request in w.decode.requests][-2:] == ["second", "third"]


async def test_without_a_link_that_has_moved_bytes_there_are_no_workers():
    async with world(linked=False) as w:
        ready, detail = w.workers.readiness()
        assert not ready
        assert detail == "no linked prefill/decode pair (1 prefill, 1 decode ready)"
        with pytest.raises(NoWorkers) as refusal:
            w.admit(sequence())
        assert refusal.value.retry_after_s is not None


async def test_a_draining_worker_gets_no_new_requests():
    async with world() as w:
        assert w.workers.readiness() == (True, "1 linked prefill/decode pairs")
        w.decode.status = WorkerStatus.DRAINING
        await w.cluster.announce()
        await two_refreshes(w)
        with pytest.raises(NoWorkers):
            w.admit(sequence())


async def test_a_prompt_larger_than_every_worker_is_refused():
    async with world() as w:
        with pytest.raises(ContextOverflow, match=r"200 prompt tokens .* more than 200 tokens"):
            w.admit(sequence(prompt=tuple(range(200))))


async def test_max_tokens_is_cut_to_what_a_worker_can_hold():
    async with world() as w:
        chunks = await w.generate(sequence(max_tokens=5000, prompt=tuple(range(190))))
        assert tokens(chunks) == scripted(10)
        assert chunks[-1].finish is FinishReason.LENGTH


async def test_an_id_can_be_used_by_one_request_at_a_time():
    async with world() as w:
        admitted = w.admit(sequence())
        with pytest.raises(Broken):
            w.admit(sequence())
        w.dispatcher.release(admitted)
        with pytest.raises(Broken):
            await consume(w.dispatcher.run(admitted))
        assert tokens(await w.generate(sequence("other"))) == scripted(5)


async def test_draining_refuses_new_requests_and_finishes_running_ones():
    async with world(decode=[(ScriptedAction(Phase.RESERVE, Busy(), times=5),)]) as w:
        run = asyncio.create_task(w.generate(sequence()))
        await w.decode.reached(Phase.RESERVE)
        w.dispatcher.drain()
        with pytest.raises(Draining):
            w.admit(sequence("late"))
        async with asyncio.timeout(5):
            await w.dispatcher.wait_empty()
        assert tokens(await run) == scripted(5)


async def test_the_same_prompt_goes_back_to_the_workers_that_hold_it():
    async with world(prefill=[(), ()], decode=[(), ()]) as w:
        for name in ("a", "b", "c"):
            await w.generate(sequence(name, prompt=tuple(range(100))))
        assert sorted(len(prefill.requests) for prefill in w.cluster.prefills) == [0, 3]
        assert sorted(len(decode.requests) for decode in w.cluster.decodes) == [0, 3]


async def test_different_prompts_are_spread():
    async with world(prefill=[(), ()], decode=[(), ()]) as w:
        sequences = [sequence(str(n), prompt=tuple(range(n, n + 40))) for n in range(4)]
        for chunks in await asyncio.gather(*(w.generate(one) for one in sequences)):
            assert tokens(chunks) == scripted(5)
        assert [len(prefill.requests) for prefill in w.cluster.prefills] == [2, 2]
        assert [len(decode.requests) for decode in w.cluster.decodes] == [2, 2]


async def test_prompts_of_one_affinity_go_to_the_same_workers():
    """No prompt fills a page, so that the cache attracts none."""
    async with world(prefill=[(), ()], decode=[(), ()]) as w:
        for number, affinity in enumerate(("00000000", "00000003") * 3):
            await w.generate(sequence(str(number), prompt=(number, 1, 2), max_tokens=2, affinity=affinity))
        placed = [sorted(request.id.request_id for request in worker.requests) for worker in w.cluster.prefills]
        assert placed == [["0", "2", "4"], ["1", "3", "5"]]
        assert [len(decode.requests) for decode in w.cluster.decodes] == [3, 3]


async def test_the_next_turn_goes_to_the_decode_worker_of_the_last():
    """The first prompt fills no page, so only pages that decode computed attract the second turn."""
    async with world(decode=[(), ()]) as w:
        answer = await w.generate(sequence("turn-1", max_tokens=21, prompt=(1, 2, 3)))
        first = next(decode for decode in w.cluster.decodes if decode.requests)
        for number in range(3):
            turn = (1, 2, 3, *(token for _, token in tokens(answer)), 77 + number)
            await w.generate(sequence(f"turn-2-{number}", prompt=turn, max_tokens=2))
        assert len(first.reservations) == 4
