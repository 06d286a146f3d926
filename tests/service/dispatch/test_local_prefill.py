"""Requests whose prompt decode computes itself: one worker makes all tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from baton.domain.errors import DeadlineExceeded, NoWorkers
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.worker import WorkerBudgets
from baton.telemetry.request_trace import Stage
from tests.mock_workers import Busy, Crash, Fail, Hold, MockDecode, Phase, ScriptedAction
from tests.service.dispatch.dispatch_world import World, scripted, sequence, tokens, two_refreshes, world

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("both_streams")]


class SelfishDecode(MockDecode):
    """A mock decode worker that prefills for itself."""

    budgets = WorkerBudgets(prefill_tokens=64, rows=8)


@asynccontextmanager
async def selfish_world(*scripts: Sequence[ScriptedAction], num_prefill: int = 0) -> AsyncIterator[World]:
    decodes = [SelfishDecode(f"decode-{n}", script) for n, script in enumerate(scripts)]
    async with world([()] * num_prefill, []) as w:
        for decode in decodes:
            await decode.start()
            w.cluster.decodes.append(decode)
        await w.cluster.announce()
        await two_refreshes(w)
        yield w


async def test_decode_prefills_for_itself_without_prefill_workers():
    async with selfish_world(()) as w:
        assert w.workers.readiness()[0]
        assert tokens(await w.generate(sequence())) == scripted(5)
        (call,) = w.decode.generates
        assert (call.prefill_id, call.prefill_incarnation) == (w.decode.id, w.decode.incarnation)
        assert await w.state(sequence()) is RequestState.FINISHED
        assert Stage.PREFILL.value not in w.timings.entries


async def test_a_single_token_finishes_a_local_sequence():
    async with selfish_world(()) as w:
        assert tokens(await w.generate(sequence(max_tokens=1))) == scripted(1)
        assert await w.state(sequence(max_tokens=1)) is RequestState.FINISHED


async def test_a_decode_worker_without_local_prefill_is_no_pair():
    async with world([], [()]) as w:
        assert not w.workers.readiness()[0]
        with pytest.raises(NoWorkers):
            await w.generate(sequence())


async def test_a_prefill_worker_is_preferred_until_it_is_busy():
    async with selfish_world((), num_prefill=1) as w:
        assert tokens(await w.generate(sequence("first"))) == scripted(5)
        assert len(w.prefill.requests) == 1
        await w.cluster.change_load(w.prefill, waiting_tokens=1000)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence("second"))) == scripted(5)
        assert len(w.prefill.requests) == 1
        assert w.decode.generates[-1].prefill_id == w.decode.id


@pytest.mark.parametrize("phase", [Phase.RESERVE, Phase.IMPORT])
async def test_a_worker_lost_before_the_first_token_is_replaced(phase):
    async with selfish_world([ScriptedAction(phase, Crash())], ()) as w:
        await w.cluster.change_load(w.cluster.decodes[1], running_rows=4)  # second choice
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert w.cluster.decodes[1].requests[-1].id == AttemptId(RequestId("r"), 2)


async def test_a_worker_lost_while_decoding_is_replaced_seamlessly():
    async with selfish_world([ScriptedAction(Phase.DECODE, Crash(), index=3)], ()) as w:
        await w.cluster.change_load(w.cluster.decodes[1], running_rows=4)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        again = w.cluster.decodes[1].requests[-1]
        assert again.tokens[again.num_prompt_tokens :] == tuple(token for _, token in scripted(again.num_emitted))


async def test_failures_are_bounded_and_typed():
    async with selfish_world([ScriptedAction(Phase.IMPORT, Fail("link_broken"), times=1)]) as w:
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert [request.id.attempt for request in w.decode.requests] == [1, 2]


async def test_a_cancelled_request_is_aborted_once():
    async with selfish_world([ScriptedAction(Phase.DECODE, Hold(), index=2)]) as w:
        run = asyncio.create_task(w.generate(sequence()))
        await w.decode.reached(Phase.DECODE, times=3)
        run.cancel()
        assert await w.decode.aborted(AttemptId(RequestId("r"), 1)) == "cancelled"
        await asyncio.gather(run, return_exceptions=True)
        assert len(w.decode.aborts) == 1


async def test_a_worker_that_takes_no_prompts_gets_those_of_another_one():
    """The record that placement goes by still has the old budget, as in an outage of the store: no attempt is lost."""
    no_prompts = ScriptedAction(Phase.RESERVE, Busy(60.0, no_prompts=True))
    async with selfish_world([no_prompts], num_prefill=1) as w:
        await w.cluster.change_load(w.prefill, waiting_tokens=1000)  # local is cheaper
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert [one.computes_prompt for one in w.decode.reservations] == [True, False]
        assert [request.id.attempt for request in w.prefill.requests] == [1]


async def test_a_prompt_that_no_worker_takes_waits_for_its_deadline():
    no_prompts = ScriptedAction(Phase.RESERVE, Busy(0.05, no_prompts=True), times=10_000)
    async with selfish_world([no_prompts]) as w:
        with pytest.raises(DeadlineExceeded):
            await w.generate(sequence(deadline_s=2.0))
        assert 2 <= len(w.decode.reservations) <= 42, "it asks again after the pause, not at once"


async def test_requests_wait_while_every_budget_is_0():
    async with selfish_world((), num_prefill=1) as w:
        await w.cluster.change_budgets(w.decode, rows=0)
        await two_refreshes(w)
        assert not w.workers.readiness()[0]
        await w.cluster.change_budgets(w.decode, rows=8, prefill_tokens=0)
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert len(w.prefill.requests) == 1
