"""A status line in the log every `STATUS_INTERVAL_S` while requests are open. Owned by `dispatcher`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.telemetry.logs import get_logger

STATUS_INTERVAL_S = 10.0

log = get_logger(__name__)


class StatusLog:
    """`fields` gives the line's values, or None when no request is open. Idle routers have no timer and no line."""

    def __init__(self, fields: Callable[[], dict[str, int] | None], interval_s: float = STATUS_INTERVAL_S) -> None:
        self.num_tokens = 0  # since the last line; the dispatcher adds to it
        self._fields = fields
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """A request was admitted: the next line comes one interval from now, unless one is due before."""
        if self._timer is None:
            self.num_tokens = 0
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._write)

    def _write(self) -> None:
        self._timer = None
        fields = self._fields()
        if fields is not None:
            log.info("router_status", tokens_per_s=round(self.num_tokens / self._interval_s, 1), **fields)
            self.start()
