"""The router's status line: regular while requests are open, silent otherwise."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from baton.services.router.dispatch.status_log import StatusLog


async def test_a_busy_router_logs_its_rate_and_an_idle_one_nothing():
    asked = asyncio.Event()
    open_requests = [{"running": 2}, {"running": 1}, None]

    def fields() -> dict[str, int] | None:
        if len(open_requests) == 1:
            asked.set()
        return open_requests.pop(0)

    with capture_logs() as lines:
        status = StatusLog(fields, interval_s=0.01)
        status.start()
        status.start()
        status.num_tokens += 7
        async with asyncio.timeout(5):
            await asked.wait()
    assert [(line["event"], line["running"], line["tokens_per_s"]) for line in lines] == [
        ("router_status", 2, 700.0),
        ("router_status", 1, 0.0),
    ]


async def test_a_status_log_starts_again_after_an_idle_time():
    written: asyncio.Queue[None] = asyncio.Queue()
    status = StatusLog(lambda: written.put_nowait(None), interval_s=0.001)
    for _ in range(2):
        status.start()
        async with asyncio.timeout(5):
            await written.get()
