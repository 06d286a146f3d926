"""A dispatcher with several tenants: turns, places, priorities, and the end of a slot."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.errors import Overloaded
from baton.services.router.admission.admission_queue import AdmissionLimits
from baton.services.router.admission.tenants import TenantLimits, TenantTable
from baton.services.router.generation import SequenceSpec
from baton.telemetry.metrics import REGISTRY
from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.service.dispatch.dispatch_world import LIMITS, REQUEST_BYTES, World, consume, sequence, world

pytestmark = pytest.mark.timeout(60)

ONE_PLACE = replace(LIMITS, admission=AdmissionLimits(max_running_requests=1))
HELD = [(ScriptedAction(Phase.SEAL, Hold()),)]


def asked(name: str, tenant: str, priority: int = 0) -> SequenceSpec:
    return replace(sequence(name), tenant=tenant, priority=priority)


def decisions(decision: str, reason: str, tenant: str) -> float:
    labels = {"decision": decision, "reason": reason, "tenant": tenant}
    return REGISTRY.get_sample_value("baton_admission_total", labels) or 0.0


async def order_of_starts(w: World, *asks: SequenceSpec) -> list[str]:
    """Admits one after the other while the first is held; returns the order in which prefill got them."""
    runs = [asyncio.create_task(consume(w.dispatcher.run(w.admit(asks[0]))))]
    await w.prefill.reached(Phase.SEAL)
    runs += [asyncio.create_task(consume(w.dispatcher.run(w.admit(ask)))) for ask in asks[1:]]
    w.prefill.release()
    await asyncio.gather(*runs)
    return [str(request.id.request_id) for request in w.prefill.requests]


async def test_tenants_take_turns():
    async with world(HELD, limits=ONE_PLACE) as w:
        flood = [asked(f"flood-{n}", "flood") for n in range(4)]
        order = await order_of_starts(w, *flood, asked("steady-0", "steady"), asked("steady-1", "steady"))
    assert order == ["flood-0", "steady-0", "flood-1", "steady-1", "flood-2", "flood-3"]


async def test_a_higher_priority_overtakes_within_its_tenant():
    async with world(HELD, limits=ONE_PLACE) as w:
        asks = [asked("first", ""), asked("low", "", -1), asked("normal", ""), asked("high", "", 2)]
        order = await order_of_starts(w, *asks)
    assert order == ["first", "high", "normal", "low"]


async def test_a_priority_beyond_the_highest_is_the_highest():
    async with world(HELD, limits=ONE_PLACE) as w:
        asks = [asked("first", ""), asked("low", "", -(2**31)), asked("high", "", 3), asked("higher", "", 2**31 - 1)]
        order = await order_of_starts(w, *asks)
        priorities = [request.priority for request in w.prefill.requests]
    assert order == ["first", "high", "higher", "low"]
    assert priorities == [0, 3, 3, -3]


async def test_a_tenant_has_no_more_places_than_its_limit():
    tenants = TenantTable(by_name={"capped": TenantLimits(max_slots=1)})
    async with world(HELD, limits=replace(LIMITS, tenants=tenants)) as w:
        asks = [asked("capped-0", "capped"), asked("capped-1", "capped"), asked("free-0", "free")]
        assert await order_of_starts(w, *asks) == ["capped-0", "free-0", "capped-1"]


async def test_admission_is_counted_by_tenant():
    before = decisions("admitted", "", "alice"), decisions("refused", "overloaded", "alice")
    limits = replace(LIMITS, admission=AdmissionLimits(1, max_queued_bytes=REQUEST_BYTES))
    async with world(HELD, limits=limits) as w:
        admitted = [w.admit(asked(f"r{n}", "alice")) for n in range(2)]
        with pytest.raises(Overloaded):
            w.admit(asked("r2", "alice"))
        for each in admitted:
            w.dispatcher.release(each)
    after = decisions("admitted", "", "alice"), decisions("refused", "overloaded", "alice")
    assert after == (before[0] + 2, before[1] + 1)


async def test_full_memory_sends_the_newest_of_the_longest_queue_away():
    limits = replace(LIMITS, admission=AdmissionLimits(1, max_queued_bytes=2 * REQUEST_BYTES))
    async with world(HELD, limits=limits) as w:
        running = asyncio.create_task(consume(w.dispatcher.run(w.admit(asked("running", "flood")))))
        await w.prefill.reached(Phase.SEAL)
        flood = [asyncio.create_task(consume(w.dispatcher.run(w.admit(asked(f"f{n}", "flood"))))) for n in range(2)]
        steady = asyncio.create_task(consume(w.dispatcher.run(w.admit(asked("steady", "steady")))))
        with pytest.raises(Overloaded):
            await flood[1]
        w.prefill.release()
        await asyncio.gather(running, flood[0], steady)


async def test_the_slot_ends_with_the_last_token_and_not_with_the_reader():
    """The client of the first request does not take its last chunk; the next request runs all the same."""
    async with world(limits=ONE_PLACE) as w:
        unread = w.dispatcher.run(w.admit(asked("unread", "")))
        finish = None
        while finish is None:
            finish = (await anext(unread)).finish
        async with asyncio.timeout(5):
            assert (await w.generate(asked("next", "")))[-1].finish is not None
        await unread.aclose()
