"""The INFO line `worker_status`: rates and load, every few seconds while the worker is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.domain.worker import Activity, WorkerLoad
from baton.telemetry.logs import get_logger

log = get_logger()

INTERVAL_S = 10.0


def status_fields(before: Activity, after: Activity, load: WorkerLoad, seconds: float) -> dict[str, float] | None:
    """Fields of a line for the last `seconds`; None for an idle worker."""
    num_tokens = after.num_tokens - before.num_tokens
    if not (num_tokens or load.running_rows or load.waiting_requests):
        return None
    num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
    num_cached = after.num_cached_tokens - before.num_cached_tokens
    return {
        "tokens_per_s": round(num_tokens / seconds, 1),
        "rows": load.running_rows,
        "waiting": load.waiting_requests,
        "available_pages": load.available_pages,
        "total_pages": load.total_pages,
        "prefix_hit_rate": round(num_cached / num_prompt, 3) if num_prompt else 0.0,
    }


async def log_status_forever(
    activity: Callable[[], Activity], load: Callable[[], WorkerLoad], interval_s: float = INTERVAL_S
) -> None:
    """Logs a line per interval until cancelled."""
    before = activity()
    while True:
        await asyncio.sleep(interval_s)
        after = activity()
        fields = status_fields(before, after, load(), interval_s)
        if fields is not None:
            log.info("worker_status", **fields)
        before = after
