"""Logs a status line every `STATUS_INTERVAL_S` while requests are open. Owned by `dispatcher`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.telemetry.logs import get_logger

STATUS_INTERVAL_S = 10.0

log = get_logger(__name__)


class StatusLog:
    """`fields` returns the values of the line; None when no request is open, which stops the timer."""

    def __init__(self, fields: Callable[[], dict[str, int] | None], interval_s: float = STATUS_INTERVAL_S) -> None:
        self.num_tokens = 0  # since the last line; the dispatcher counts
        self._fields = fields
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the timer unless it runs. Called for every admitted request."""
        if self._timer is None:
            self.num_tokens = 0
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._write)

    def _write(self) -> None:
        self._timer = None
        fields = self._fields()
        if fields is not None:
            log.info("router_status", tokens_per_s=round(self.num_tokens / self._interval_s, 1), **fields)
            self.start()
