"""A `TimedEvent` wakes all that wait, ends a wait after its time, and keeps nothing of one that was cancelled."""

from __future__ import annotations

import asyncio

from baton.store.timed_event import TimedEvent

LONG_S = 60.0


async def waiting(event: TimedEvent, timeout_s: float = LONG_S) -> asyncio.Task[bool]:
    task = asyncio.create_task(event.wait(timeout_s))
    await asyncio.sleep(0)
    return task


async def test_all_that_wait_are_woken_once_it_is_set() -> None:
    event = TimedEvent()
    tasks = [await waiting(event) for _ in range(3)]
    assert not any(task.done() for task in tasks)
    event.set()
    event.set()
    assert await asyncio.gather(*tasks) == [True] * 3
    assert await event.wait(0.0), "it is set: nothing waits"


async def test_a_wait_ends_after_its_time() -> None:
    event = TimedEvent()
    assert not await event.wait(0.001)
    event.set()
    event.clear()
    assert not event.is_set()
    assert not await event.wait(0.001)


async def test_an_event_that_is_cleared_at_once_has_woken_those_that_waited() -> None:
    event = TimedEvent()
    task = await waiting(event)
    event.set()
    event.clear()
    assert not await task, "as `wait_for_event`: it tells whether the event is set now"


async def test_a_cancelled_wait_leaves_nothing() -> None:
    event = TimedEvent()
    cancelled, other = await waiting(event), await waiting(event)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    event.set()
    assert await other
    assert event._waiters == []
