"""A dispatcher with more requests than its workers can run: bounds, order and refusals, with mock workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from baton.domain.errors import DeadlineExceeded, Overloaded
from baton.domain.lifecycle import RequestState
from baton.services.router.admission.admission_queue import AdmissionLimits
from baton.services.router.dispatch.reserve import MAX_ASKING, ReserveLimits
from baton.services.router.edge.body_budget import BodyBudget
from baton.services.router.routes import MAX_BODIES
from baton.telemetry.metrics import REGISTRY
from tests.mock_workers import Busy, Hold, MockDecode, Phase, ScriptedAction
from tests.service.dispatch.dispatch_world import (
    LIMITS,
    ONE_AT_A_TIME,
    REQUEST_BYTES,
    World,
    consume,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)
from tests.service.http.http_server import router, says

pytestmark = pytest.mark.timeout(90)

ROOMY = replace(
    LIMITS,
    admission=AdmissionLimits(max_running_requests=100),
    reserve=ReserveLimits(reserve_timeout_s=30.0, worker_wait_s=30.0),  # on a busy machine no worker counts as lost
)


def gauge(name: str) -> float:
    value = REGISTRY.get_sample_value(name)
    assert value is not None
    return value


def run_all(w: World, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(w.generate(sequence(f"r{n}"))) for n in range(count)]


async def given_up(*runs: Awaitable[Any]) -> None:
    """Cancels the tasks and waits for their end."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_running_requests_never_exceed_the_rows_of_the_workers():
    async with world(decode=[(ScriptedAction(Phase.IMPORT, Hold(), times=99),)], limits=ROOMY) as w:
        await w.cluster.change_budgets(w.decode, rows=2)
        await two_refreshes(w)
        runs = run_all(w, 6)
        await w.decode.reached(Phase.IMPORT, times=2)
        await two_refreshes(w)
        assert len(w.decode.reservations) == 2
        assert gauge("baton_queued_requests") == 4
        w.decode.release()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * 6


async def test_a_new_worker_starts_queued_requests():
    async with world(decode=[(ScriptedAction(Phase.IMPORT, Hold(), times=99),)], limits=ROOMY) as w:
        await w.cluster.change_budgets(w.decode, rows=1)
        await two_refreshes(w)
        runs = run_all(w, 3)
        await w.decode.reached(Phase.IMPORT)
        newcomer = MockDecode("decode-9")
        w.cluster.decodes.append(newcomer)
        await newcomer.start()
        await w.cluster.announce()
        async with asyncio.timeout(20):
            await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        w.decode.release()
        await asyncio.gather(*runs)
        assert newcomer.requests


async def test_a_cancelled_request_leaves_the_queue_at_once():
    async with world([(ScriptedAction(Phase.SEAL, Hold()),)], limits=ONE_AT_A_TIME) as w:
        first = asyncio.create_task(w.generate(sequence("first")))
        await w.prefill.reached(Phase.SEAL)
        gone, unstarted = asyncio.create_task(w.generate(sequence("gone"))), None
        await asyncio.wait([gone], timeout=0)
        unstarted = w.admit(sequence("unstarted"))
        assert gauge("baton_queued_requests") == 2
        with pytest.raises(Overloaded):
            w.dispatcher.refuse_if_full(10.0)
        await given_up(gone)
        w.dispatcher.release(unstarted)
        assert gauge("baton_queued_requests") == gauge("baton_queued_tokens") == 0
        w.dispatcher.refuse_if_full(10.0)
        await given_up(first)
        assert {request.id.request_id for request in w.prefill.requests} == {"first"}


async def test_a_request_past_its_deadline_leaves_the_queue_unserved():
    async with world([(ScriptedAction(Phase.SEAL, Hold()),)], limits=ONE_AT_A_TIME) as w:
        first = asyncio.create_task(w.generate(sequence("first")))
        await w.prefill.reached(Phase.SEAL)
        with pytest.raises(DeadlineExceeded):
            await w.generate(sequence("late", deadline_s=1.0))
        assert gauge("baton_queued_requests") == 0
        w.prefill.release()
        await first
        assert {request.id.request_id for request in w.prefill.requests} == {"first"}
        assert await w.state(sequence("late")) is RequestState.FAILED


async def test_a_request_that_would_be_too_late_is_refused_at_once():
    """A measured request takes at least 0.2 s; with two ahead, none starts within 0.1 s."""
    async with world([(ScriptedAction(Phase.SEAL, Hold()),)], limits=ONE_AT_A_TIME) as w:
        first = asyncio.create_task(w.generate(sequence("first")))
        await w.prefill.reached(Phase.SEAL)
        await asyncio.wait([first], timeout=0.2)
        with pytest.raises(Overloaded) as refusal:
            w.admit(sequence("late", deadline_s=0.1))
        assert 1.0 <= (refusal.value.retry_after_s or 0.0) <= 120.0
        w.dispatcher.release(w.admit(sequence("patient", deadline_s=60.0)))
        await given_up(first)


async def test_a_burst_stays_within_the_bounds_and_leaves_nothing():
    before = [gauge(name) for name in ("baton_queued_requests", "baton_queued_tokens")]
    async with world(decode=[(ScriptedAction(Phase.IMPORT, Hold(), times=999),)]) as w:
        queued, num_refused = [], 0
        for n in range(2000):
            try:
                queued.append(w.admit(sequence(f"r{n}")))
            except Overloaded:
                num_refused += 1
        limits = LIMITS.admission
        assert len(queued) == w.dispatcher.num_open
        assert len(queued) == limits.max_running_requests + limits.max_queued_bytes // REQUEST_BYTES
        assert num_refused == 2000 - len(queued)
        runs = [asyncio.create_task(consume(w.dispatcher.run(admitted))) for admitted in queued]
        await w.decode.reached(Phase.IMPORT, times=limits.max_running_requests)
        await given_up(*runs)
        assert w.dispatcher.num_open == 0
        assert [gauge(name) for name in ("baton_queued_requests", "baton_queued_tokens")] == before


async def test_attempts_that_wait_for_pages_are_served_in_order():
    """Only the first entries of the queue try again, each after its own pause. None overtakes."""
    script = (
        ScriptedAction(Phase.RESERVE, Busy(0.01), times=1_000_000),
        ScriptedAction(Phase.IMPORT, Hold(), times=99),
    )
    async with world(decode=[script], limits=ROOMY) as w:
        await w.cluster.change_budgets(w.decode, rows=100)
        await two_refreshes(w)
        names = [f"r{number}" for number in range(30)]
        runs = [asyncio.create_task(w.generate(sequence(names[0], deadline_s=60.0)))]
        await until_in_queue(w, 1)  # any newcomer may ask before the first refusal is back
        runs += [asyncio.create_task(w.generate(sequence(name, deadline_s=60.0))) for name in names[1:]]
        await until_in_queue(w, len(names))
        num_asked = len(w.decode.reservations)
        await w.decode.reached(Phase.RESERVE, times=num_asked + 100)
        assert asked(w) == names[:MAX_ASKING]
        w.decode.script.pop(0)
        await w.decode.reached(Phase.IMPORT, times=len(names))
        assert asked(w) == names
        w.decode.release()
        assert [tokens(chunks) for chunks in await asyncio.gather(*runs)] == [scripted(5)] * len(names)


def asked(w: World) -> list[str]:
    """The requests that have asked decode for room, in the order of their first tries."""
    return list(dict.fromkeys(message.id.request_id for message in w.decode.reservations))


async def until_in_queue(w: World, num_waiting: int) -> None:
    """Waits until so many attempts wait for room on any worker."""
    queues = w.dispatcher._reserver._wait_queues
    async with asyncio.timeout(20):
        while sum(queue.num_waiting for queue in queues.values()) < num_waiting:
            await w.workers.wait_for_change()


def test_the_total_size_of_bodies_is_bounded_and_released():
    budget = BodyBudget(100)
    with budget.track() as first, budget.track() as second:
        first(60)
        second(40)
        with pytest.raises(Overloaded):
            first(1)
        assert budget.num_bytes == 100
    assert budget.num_bytes == 0


async def test_a_body_over_the_total_bound_is_refused():
    """Clients have sent large bodies except for the last byte. The rest of the bound is too small for another body."""
    async with router(says("well"), max_body_bytes=65536) as w:
        host, port = w.http.base_url.host, w.http.base_url.port
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: 65536\r\n\r\n".encode()
        slow = [await asyncio.open_connection(host, port) for _ in range(MAX_BODIES)]
        for _, writer in slow:
            writer.write(head + b" " * 65535)
            await writer.drain()
        async with asyncio.timeout(20):
            while (response := await w.complete(max_tokens=4, prompt="a" * 100)).status_code == 200:
                continue  # not all of it has arrived yet
        assert response.status_code == 429
        for _, writer in slow:
            writer.close()
        async with asyncio.timeout(20):
            while (response := await w.complete(max_tokens=4)).status_code != 200:
                assert response.status_code == 429


async def test_a_full_router_refuses_before_it_reads_the_body():
    """The 429 is sent although the body never arrives."""
    async with router(says("well")) as w:
        w.dispatcher.full_error = Overloaded("full", retry_after_s=17.2)
        host, port = w.http.base_url.host, w.http.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 4000000\r\n\r\n".encode())
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 18\r\n" in answer.lower()
        writer.close()
        await writer.wait_closed()
        w.dispatcher.full_error = None
        assert (await w.complete(max_tokens=4)).status_code == 200
