"""Prefill and decode that cannot reach each other while the router reaches both: the link is broken, not the workers.

The decode worker simulates a cut link: it fails every import from that prefill worker, as a real one does whose watch
or reads broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.domain.errors import LinkBroken, WorkerLost
from baton.domain.ids import AttemptId, RequestId, new_incarnation
from baton.rpc.gen import decode_pb2
from baton.services.router.dispatch.link_breaker import LinkBreakerLimits
from baton.services.router.dispatch.reserve import ReserveLimits
from tests.mock_workers import Fail, Hold, MockDecode, Phase, ScriptedAction, failure
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

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("both_streams")]

SHORT_BREAKERS = replace(WORKER_LIMITS, link_breaker=LinkBreakerLimits(first_open_s=0.05, max_open_s=0.2, grace_s=20.0))
NEVER_PROBED = replace(WORKER_LIMITS, link_breaker=LinkBreakerLimits(first_open_s=60.0, max_open_s=60.0))
LONG_WAIT = replace(LIMITS, reserve=ReserveLimits(reserve_timeout_s=2.0, worker_wait_s=20.0))


class CutDecode(MockDecode):
    """Fails imports from the prefill workers in `cut` with `code`."""

    def __init__(self, id: str, cut: set[str], code: str = "link_broken") -> None:
        super().__init__(id)
        self.cut = cut
        self.code = code

    async def Generate(  # gRPC's name
        self, message: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.GenerateEvent]:
        if message.prefill_id in self.cut:
            self.generates.append(message)
            yield decode_pb2.GenerateEvent(failed=failure(Fail(self.code)))
            return
        async for event in super().Generate(message, context):
            yield event

    @property
    def num_lost(self) -> int:
        """Imports over a cut link."""
        return len(self.generates) - len(self.requests)


@asynccontextmanager
async def cut_world(
    num_prefill: int, decodes: list[CutDecode], worker_limits: Any = SHORT_BREAKERS, limits: Any = LONG_WAIT
) -> AsyncIterator[World]:
    async with world([()] * num_prefill, [], limits=limits, worker_limits=worker_limits) as w:
        for decode in decodes:
            await decode.start()
            w.cluster.decodes.append(decode)
        await w.cluster.announce()
        await two_refreshes(w)
        yield w


@pytest.mark.parametrize("code", ["link_broken", "worker_lost", "integrity_failure"])
async def test_a_failed_link_is_avoided_and_the_other_prefill_used(code):
    """Also when decode reports a lost prefill worker: it cannot tell the worker from the link."""
    decode = CutDecode("decode-9", {"prefill-0"}, code)
    async with cut_world(2, [decode], NEVER_PROBED) as w:
        for n in range(6):
            assert tokens(await w.generate(sequence(f"r{n}"))) == scripted(5)
        assert decode.num_lost <= 1, "one request found it out for all"
        assert w.timings.entries.count("retry") == decode.num_lost


async def test_other_links_of_the_same_prefill_worker_stay_in_use():
    cut, whole = CutDecode("decode-8", {"prefill-0"}), CutDecode("decode-9", set())
    async with cut_world(1, [cut, whole], NEVER_PROBED) as w:
        await w.cluster.change_load(whole, running_rows=4)  # otherwise second choice
        await two_refreshes(w)
        for n in range(4):
            assert tokens(await w.generate(sequence(f"r{n}"))) == scripted(5)
        assert (cut.num_lost, len(cut.requests), len(whole.requests)) == (1, 0, 4)
        assert w.prefill.requests[-1].id == AttemptId(RequestId("r3"), 1)


async def test_probes_of_the_only_link_do_not_count_as_attempts():
    decode = CutDecode("decode-9", {"prefill-0"})
    async with cut_world(1, [decode]) as w:
        runs = [asyncio.create_task(w.generate(sequence(f"r{n}"))) for n in range(5)]
        async with asyncio.timeout(20):
            while decode.num_lost < 12:
                await w.workers.wait_for_change()
        assert not any(run.done() for run in runs)
        decode.cut.clear()  # no announcement, no restart
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*runs)
        assert [tokens(chunks) for chunks in answers] == [scripted(5)] * 5
        assert max(request.id.attempt for request in decode.requests) > LIMITS.max_attempts


async def test_the_error_is_raised_when_the_wait_for_workers_ends():
    decode = CutDecode("decode-9", {"prefill-0"})
    short_wait = replace(LIMITS, reserve=ReserveLimits(reserve_timeout_s=2.0, worker_wait_s=0.2))
    async with cut_world(1, [decode], NEVER_PROBED, short_wait) as w:
        w.prefill.script.append(ScriptedAction(Phase.SEAL, Hold()))  # no token: those that have one wait longer
        with pytest.raises(LinkBroken):
            await w.generate(sequence("first"))
        with pytest.raises(WorkerLost):
            await w.generate(sequence("second"))
        assert decode.num_lost == 1


async def test_a_link_that_decode_opens_again_is_used_at_once():
    decode = CutDecode("decode-9", {"prefill-0"})
    async with cut_world(1, [decode], NEVER_PROBED) as w:
        run = asyncio.create_task(w.generate(sequence()))
        await w.prefill.aborted(AttemptId(RequestId("r"), 1))
        decode.cut.clear()
        await w.store.announce(decode.record(()))  # it noticed, and dropped the link
        await two_refreshes(w)
        assert not run.done()
        await w.cluster.announce()
        async with asyncio.timeout(20):
            assert tokens(await run) == scripted(5)


async def test_a_restarted_worker_is_used_again():
    decode = CutDecode("decode-9", {"prefill-0"})
    async with cut_world(1, [decode], NEVER_PROBED) as w:
        run = asyncio.create_task(w.generate(sequence()))
        await w.prefill.aborted(AttemptId(RequestId("r"), 1))
        await w.prefill.stop()
        w.prefill.incarnation = new_incarnation()
        await w.prefill.start()
        decode.cut.clear()
        await w.cluster.announce()
        async with asyncio.timeout(20):
            assert tokens(await run) == scripted(5)


async def test_a_cancelled_probe_makes_room_for_another():
    decode = CutDecode("decode-9", {"prefill-0"})
    async with cut_world(1, [decode]) as w:
        first = asyncio.create_task(w.generate(sequence("first")))
        await w.prefill.aborted(AttemptId(RequestId("first"), 1))
        decode.script.append(ScriptedAction(Phase.RESERVE, Hold()))  # the trial hangs
        num_promises = len(decode.reservations)
        await decode.reached(Phase.RESERVE, num_promises + 1)
        decode.cut.clear()
        second = asyncio.create_task(w.generate(sequence("second")))
        await two_refreshes(w)
        assert not second.done()
        first.cancel()
        async with asyncio.timeout(20):
            assert tokens(await second) == scripted(5)
        await asyncio.gather(first, return_exceptions=True)
