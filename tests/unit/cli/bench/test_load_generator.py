"""Timing of a run: no request early, bounded concurrency, and lateness apart from waiting."""

import asyncio
import time

import pytest

from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.results.records import Delivery, MeasuredAnswer, PlannedRequest, RequestRow

WAIT_S = 10.0


class FakeClock:
    """A clock that a test advances."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Server:
    """Answers when released, and records requests under way."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.sent: list[int] = []
        self.most_at_once = 0
        self._gates: dict[int, asyncio.Event] = {}
        self._changed = asyncio.Event()

    async def __call__(self, request: PlannedRequest) -> MeasuredAnswer:
        sent_at_s = self.clock()
        gate = self._gates[request.index] = asyncio.Event()
        self.sent.append(request.index)
        self.most_at_once = max(self.most_at_once, len(self._gates))
        self._changed.set()
        await gate.wait()
        del self._gates[request.index]
        return MeasuredAnswer(sent_at_s, self.clock() - sent_at_s, (Delivery(0.0, 1),), 1)

    async def until_sent(self, *indices: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.sent != list(indices):
                self._changed.clear()
                await self._changed.wait()

    def release(self, index: int) -> None:
        self._gates[index].set()


def plan(*arrivals: float) -> list[PlannedRequest]:
    return [PlannedRequest(index, arrival, (5, 6), 1) for index, arrival in enumerate(arrivals)]


async def answered_at_once(request: PlannedRequest) -> MeasuredAnswer:
    now = time.perf_counter()
    return MeasuredAnswer(now, 0.0, (Delivery(0.0, 1),), 1)


async def test_requests_go_out_in_order_and_never_early():
    rows = await run_load(plan(0.0, 0.01, 0.03), answered_at_once, clock=time.perf_counter)
    assert [row.index for row in rows] == [0, 1, 2]
    assert all(row.sent_s >= row.arrival_s == row.due_s for row in rows)


async def test_an_open_loop_does_not_wait_for_answers():
    clock = FakeClock()
    server = Server(clock)
    run = asyncio.create_task(run_load(plan(0.0, 0.0, 0.0), server, clock=clock))
    await server.until_sent(0, 1, 2)
    for index in (2, 0, 1):
        server.release(index)
    rows = await asyncio.wait_for(run, WAIT_S)
    assert [row.index for row in rows] == [0, 1, 2]
    assert server.most_at_once == 3


async def test_concurrency_is_bounded_and_waiting_is_not_lateness():
    clock = FakeClock()
    server = Server(clock)
    seen: list[RequestRow] = []
    run = asyncio.create_task(
        run_load(plan(0.0, 0.0, 0.0, 0.0), server, clock=clock, max_concurrency=2, on_row=seen.append)
    )
    await server.until_sent(0, 1)
    clock.now_s += 3.0
    server.release(1)
    await server.until_sent(0, 1, 2)
    server.release(0)
    await server.until_sent(0, 1, 2, 3)
    server.release(2)
    server.release(3)
    rows = await asyncio.wait_for(run, WAIT_S)
    assert server.most_at_once == 2
    assert [(row.arrival_s, row.due_s, row.sent_s) for row in rows] == [(0, 0, 0), (0, 0, 0), (0, 3, 3), (0, 3, 3)]
    assert [row.lag_s for row in rows] == [0.0] * 4
    assert [row.ended_s for row in rows] == [3.0, 3.0, 0.0, 0.0]
    assert sorted(row.index for row in seen) == [0, 1, 2, 3]


async def test_a_request_behind_a_delayed_one_is_not_late():
    """Its arrival passes while the one before it waits for a slot."""
    clock = FakeClock()
    server = Server(clock)
    run = asyncio.create_task(run_load(plan(0.0, 0.0, 2.0), server, clock=clock, max_concurrency=1))
    await server.until_sent(0)
    clock.now_s += 5.0
    server.release(0)
    await server.until_sent(0, 1)
    server.release(1)
    await server.until_sent(0, 1, 2)
    server.release(2)
    rows = await asyncio.wait_for(run, WAIT_S)
    assert [row.due_s for row in rows] == [0.0, 5.0, 5.0]
    assert [row.lag_s for row in rows] == [0.0] * 3


async def test_a_client_that_oversleeps_is_late():
    clock = FakeClock()

    async def slow_to_send(request: PlannedRequest) -> MeasuredAnswer:
        clock.now_s += 0.25
        return MeasuredAnswer(clock(), 0.0, (Delivery(0.0, 1),), 1)

    [row] = await run_load(plan(0.0), slow_to_send, clock=clock)
    assert row.lag_s == 0.25


async def test_cancelling_a_run_leaves_no_request_behind():
    server = Server(FakeClock())
    run = asyncio.create_task(run_load(plan(0.0, 0.0, 3600.0), server, clock=server.clock))
    await server.until_sent(0, 1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.all_tasks() == {asyncio.current_task()}
