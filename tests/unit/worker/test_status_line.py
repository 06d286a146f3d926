"""The status line: rates over its interval, and silence of an idle worker."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from baton.domain.worker import Activity, WorkerLoad
from baton.worker.status_line import log_status_forever, status_fields

LOAD = WorkerLoad(waiting_requests=2, running_rows=3, available_pages=5, total_pages=8)


def test_a_line_gives_the_rates_of_its_interval():
    fields = status_fields(Activity(100, 50, 10), Activity(300, 90, 40), LOAD, 10.0)
    assert fields == {
        "tokens_per_s": 20.0, "rows": 3, "waiting": 2, "available_pages": 5, "total_pages": 8, "prefix_hit_rate": 0.75,
    }  # fmt: skip


def test_an_idle_worker_has_no_line():
    assert status_fields(Activity(9, 9, 9), Activity(9, 9, 9), WorkerLoad(), 10.0) is None
    assert status_fields(Activity(9, 9, 9), Activity(9, 9, 9), LOAD, 10.0) is not None


async def test_lines_are_logged_while_tokens_come():
    totals = iter([Activity(), Activity(num_tokens=5), Activity(num_tokens=5)])
    ended = asyncio.Event()

    def activity() -> Activity:
        try:
            return next(totals)
        except StopIteration:
            ended.set()
            return Activity(num_tokens=5)

    with capture_logs() as lines:
        task = asyncio.create_task(log_status_forever(activity, WorkerLoad, interval_s=0.001))
        await asyncio.wait_for(ended.wait(), 10.0)
        task.cancel()
    assert [line["event"] for line in lines] == ["worker_status"]
