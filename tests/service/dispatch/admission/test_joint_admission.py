"""Joint admission with real calls to mock workers: who waits in the fair queue, and that stale records delay nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from baton.domain.timing.step_time import StepTimeFit
from baton.domain.worker import PageCounts
from baton.services.router.admission.admission_queue import AdmissionLimits
from baton.services.router.admission.credits import Shortage
from baton.services.router.admission.start_rules import MAX_ASKING
from tests.mock_workers import Busy, Hold, Phase, ScriptedAction
from tests.service.dispatch.dispatch_world import (
    LIMITS,
    WORKER_LIMITS,
    World,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)

pytestmark = pytest.mark.timeout(60)

ROOMY = replace(LIMITS, admission=AdmissionLimits(max_running_requests=100))
HELD = (ScriptedAction(Phase.IMPORT, Hold(), times=99),)


def run_all(w: World, names: Iterable[str]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(w.generate(sequence(name))) for name in names]


async def test_prompts_without_pages_at_decode_wait_in_the_fair_queue():
    """One asks the worker, which is busy. The others wait in the router, not in the line before the worker."""
    full = (ScriptedAction(Phase.RESERVE, Busy(0.01), times=20),)
    async with world(decode=[full], limits=ROOMY) as w:
        await w.cluster.change_load(w.decode, available_pages=1)
        await two_refreshes(w)
        runs = run_all(w, "abcdef")
        await w.decode.reached(Phase.RESERVE, times=5)
        queue = w.dispatcher.admission_queue
        assert (queue.num_running, queue.num_waiting) == (1, 5)
        assert len({promise.id.request_id for promise in w.decode.reservations}) <= 1
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 6
        assert queue.num_without_credit[Shortage.DECODE] >= 1


async def test_a_record_that_shows_no_room_for_good_delays_nobody():
    async with world(limits=ROOMY) as w:
        await w.cluster.change_load(w.decode, available_pages=0)
        await two_refreshes(w)
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*run_all(w, [str(n) for n in range(30)]))
        assert [tokens(chunks) for chunks in answers] == [scripted(5)] * 30


async def test_one_that_got_its_room_lets_the_next_one_ask():
    """None has its first token. More than may ask at once reach prefill, though no record shows room for any."""
    async with world([(ScriptedAction(Phase.SEAL, Hold(), times=99),)], limits=ROOMY) as w:
        await w.cluster.change_load(w.decode, available_pages=0)
        await two_refreshes(w)
        runs = run_all(w, [str(n) for n in range(2 * MAX_ASKING)])
        async with asyncio.timeout(20):
            await w.prefill.reached(Phase.SEAL, times=2 * MAX_ASKING)
        w.prefill.release()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * len(runs)


async def test_prompts_without_pages_at_prefill_wait_in_the_fair_queue():
    async with world([(ScriptedAction(Phase.SEAL, Hold(), times=99),)], limits=ROOMY) as w:
        await w.cluster.change_load(w.prefill, available_pages=1, waiting_requests=1, waiting_tokens=100)
        await two_refreshes(w)
        runs = run_all(w, "abc")
        await w.prefill.reached(Phase.SEAL)
        await w.decode.reached(Phase.RESERVE)
        await two_refreshes(w)
        queue = w.dispatcher.admission_queue
        assert (queue.num_running, queue.num_waiting) == (1, 2)
        assert len(w.decode.reservations) == 1
        await w.cluster.change_load(w.prefill, available_pages=64, waiting_requests=0, waiting_tokens=0)
        await w.prefill.reached(Phase.SEAL, times=3)
        w.prefill.release()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 3


async def test_contexts_of_what_comes_count_on_an_idle_worker():
    """1 ms a token of context: two prompts of ten tokens in a step of 25 ms are too many."""
    fit = StepTimeFit((0.010, 0.0, 0.0, 0.0, 0.0, 0.0, 4.096), 0.0)
    async with world(decode=[HELD], limits=ROOMY, worker_limits=replace(WORKER_LIMITS, max_tpot_s=0.025)) as w:
        await w.cluster.change_load(w.decode, step_time=fit, pages=PageCounts())
        await two_refreshes(w)
        runs = run_all(w, "ab")
        await w.decode.reached(Phase.IMPORT)
        await two_refreshes(w)
        queue = w.dispatcher.admission_queue
        assert (queue.num_running, queue.num_waiting) == (1, 1)
        w.decode.release()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 2
