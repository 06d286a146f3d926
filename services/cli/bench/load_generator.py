"""Sends the requests of a plan at their times, with bounded concurrency, and collects the rows. Called by `commands`.

Open loop: a request is sent when it is due, whether or not earlier ones were answered. Every row has the client's own
lateness (`lag_s`), and `summary` refuses a run in which it is too large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from baton.services.cli.bench.results.records import MeasuredAnswer, PlannedRequest, RequestRow, row_of

Send = Callable[[PlannedRequest], Awaitable[MeasuredAnswer]]


async def run_load(
    plan: Sequence[PlannedRequest],
    send: Send,
    *,
    clock: Callable[[], float],
    max_concurrency: int | None = None,
    on_row: Callable[[RequestRow], None] = lambda row: None,
) -> list[RequestRow]:
    """Sends all requests and returns their rows by index. `plan` is in order of arrival; `send` is bounded and never
    raises.

    `clock`: the clock of the answers' time stamps.
    """
    rows: list[RequestRow] = []
    slots = asyncio.Semaphore(max_concurrency or len(plan) or 1)
    start_s = clock()
    held_until_s = 0.0

    async def send_one(request: PlannedRequest, due_s: float) -> None:
        try:
            row = row_of(request, await send(request), due_s=due_s, start_s=start_s)
        finally:
            slots.release()
        rows.append(row)
        on_row(row)

    async with asyncio.TaskGroup() as group:
        for request in plan:
            await _wait(start_s + request.arrival_s - clock())
            is_held = slots.locked()
            await slots.acquire()
            held_until_s = clock() - start_s if is_held else held_until_s
            group.create_task(send_one(request, max(request.arrival_s, held_until_s)))
    return sorted(rows, key=lambda row: row.index)


async def _wait(delay_s: float) -> None:
    """Sleeps until a time given by the clock alone."""
    if delay_s <= 0.0:
        return
    due = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(delay_s, due.set)
    try:
        await due.wait()
    finally:
        timer.cancel()
