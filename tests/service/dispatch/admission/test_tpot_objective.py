"""Admission by predicted TTFT and TPOT together, in tiny worlds: what fits runs, what does not waits or is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.errors import Overloaded
from baton.domain.timing.step_time import StepTimeFit
from baton.domain.worker import PageCounts
from baton.services.router.admission.admission_queue import AdmissionLimits
from tests.mock_workers import Hold, Phase, ScriptedAction
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

FIT = StepTimeFit((0.010, 0.016, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0)
"""10 ms a step and 1 ms a row."""
HELD = (ScriptedAction(Phase.IMPORT, Hold(), times=99),)
TWO_ROWS = replace(WORKER_LIMITS, max_tpot_s=0.0125)
ALL_ROWS = replace(WORKER_LIMITS, max_tpot_s=0.0185)
NOT_LONG = replace(LIMITS, admission=AdmissionLimits(8, max_ttft_s=0.2))


async def with_fit(w: World) -> None:
    for worker in w.cluster.decodes:
        await w.cluster.change_load(worker, step_time=FIT)
    await two_refreshes(w)


async def test_rows_within_the_objective_run_and_others_wait_for_them():
    async with world(decode=[HELD], worker_limits=TWO_ROWS) as w:
        await with_fit(w)
        runs = [asyncio.create_task(w.generate(sequence(name))) for name in "abc"]
        await w.decode.reached(Phase.IMPORT, times=2)
        await two_refreshes(w)
        queue = w.dispatcher.admission_queue
        assert (queue.num_running, queue.num_waiting) == (2, 1)
        assert len(w.decode.reservations) == 2
        w.decode.release()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 3


async def test_an_idle_worker_counts_with_the_contexts_of_what_comes():
    """A token of context takes 1 ms, a prompt has ten: two rows take 32 ms."""
    fit = StepTimeFit((0.010, 0.016, 0.0, 0.0, 0.0, 0.0, 4.096), 0.0)
    async with world(decode=[HELD], worker_limits=replace(WORKER_LIMITS, max_tpot_s=0.0335)) as w:
        await w.cluster.change_load(w.decode, step_time=fit)
        runs = [asyncio.create_task(w.generate(sequence("a")))]
        await w.decode.reached(Phase.IMPORT)
        await two_refreshes(w)
        runs += [asyncio.create_task(w.generate(sequence(name))) for name in "bc"]
        await w.decode.reached(Phase.IMPORT, times=2)
        await two_refreshes(w)
        queue = w.dispatcher.admission_queue
        assert (queue.num_running, queue.num_waiting) == (2, 1)
        w.decode.release()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 3


async def test_one_that_would_wait_too_long_is_refused_with_a_time_to_retry():
    async with world(decode=[HELD], limits=NOT_LONG, worker_limits=TWO_ROWS) as w:
        await with_fit(w)
        runs = [asyncio.create_task(w.generate(sequence(name))) for name in "ab"]
        await w.decode.reached(Phase.IMPORT, times=2)
        refusals = []
        for check in (lambda: w.dispatcher.refuse_if_full(10.0), lambda: w.admit(sequence("c"))):
            with pytest.raises(Overloaded) as refused:
                check()
            refusals.append(refused.value.retry_after_s)
        assert all(one is not None and one >= 1.0 for one in refusals)
        w.decode.release()
        await asyncio.gather(*runs)
        assert tokens(await w.generate(sequence("c"))) == scripted(5)


@pytest.mark.parametrize("limits", [ALL_ROWS, WORKER_LIMITS], ids=["objective of all rows", "no objective"])
async def test_nothing_is_refused_that_fits(limits):
    async with world(decode=[HELD], limits=NOT_LONG, worker_limits=limits) as w:
        await with_fit(w)
        runs = [asyncio.create_task(w.generate(sequence(str(number)))) for number in range(8)]
        await w.decode.reached(Phase.IMPORT, times=8)
        w.decode.release()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 8


async def test_a_long_prompt_goes_where_its_context_fits_the_objective():
    """Rows of the first are short, so it has time for one more, but not for one of ten tokens."""
    contexts = StepTimeFit((0.010, 0.0, 0.0, 0.0, 0.0, 0.0, 4.096), 0.0)
    async with world(decode=[(), ()], worker_limits=replace(WORKER_LIMITS, max_tpot_s=0.0155)) as w:
        slow, other = w.cluster.decodes
        await w.cluster.change_load(slow, step_time=contexts, running_rows=3, pages=PageCounts(live=1))
        await w.cluster.change_load(other, running_rows=7)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert (len(slow.reservations), len(other.reservations)) == (0, 1)


async def test_a_worker_without_rows_within_the_objective_comes_last():
    async with world(decode=[(), ()], worker_limits=TWO_ROWS) as w:
        full, other = w.cluster.decodes
        await w.cluster.change_load(full, step_time=FIT, running_rows=2)
        await w.cluster.change_load(other, running_rows=6)  # of eight: it would cost more
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert (len(full.reservations), len(other.reservations)) == (0, 1)
