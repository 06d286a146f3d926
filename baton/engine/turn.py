"""The common part of both engine loops' turns: wait for commands, check idle pages, publish load and gauges.

Owned by the engine thread; `load`, `activity` and `close` are thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from baton.domain.worker import Activity, WorkerLoad, WorkerRole
from baton.engine import step_metrics
from baton.engine.mailbox import Mailbox
from baton.kv.integrity_check import IntegrityCheck
from baton.kv.prefix_cache import PrefixCache

Command = TypeVar("Command")

IDLE_CHECK_S = 0.5
"""Quiet time before a round of the idle check begins."""
SLICE_PAUSE_S = 0.01
"""Time between two slices of a round. A command ends the wait."""


class EngineTurn(Generic[Command]):
    """Frame of a loop's turns: `take_commands`, the loop's own work, `end`."""

    def __init__(
        self,
        role: WorkerRole,
        cache: PrefixCache,
        mailbox: Mailbox[Command],
        on_idle: Callable[[], None],
        max_check_pages: int | None = None,
    ) -> None:
        """Calls `on_idle` after a turn that leaves no request. `max_check_pages`: see `IntegrityCheck`."""
        self.cache = cache
        self.mailbox = mailbox
        self.steps = step_metrics.StepMetrics(role, cache.pool)
        self.num_requests = 0
        self._on_idle = on_idle
        self._check = IntegrityCheck(cache, max_check_pages)
        self._in_round = False
        self._stepped = False
        self._load = WorkerLoad()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0

    def take_commands(self, next_wakeup: float | None) -> list[Command]:
        """Takes the commands that have come. Waits until `next_wakeup` unless the last turn ran a step."""
        return self.mailbox.take_all(self._wait_s(next_wakeup))

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Adds a prompt to `activity`."""
        self._num_prompt_tokens += num_tokens
        self._num_cached_tokens += num_cached

    def end(self, load: WorkerLoad, num_requests: int, *, stepped: bool, idle: bool) -> None:
        """Ends a turn. `stepped`: a batch ran; `idle`: nothing was done. Raises `Broken` if the idle check fails."""
        if not idle:
            self._check.restart()
        elif not self._check.done:
            self._check.run_slice()
        self._in_round = idle
        self._stepped = stepped
        self.publish(load, num_requests)
        self.steps.update_gauges(load.waiting_requests)
        if num_requests == 0:
            self._on_idle()

    def publish(self, load: WorkerLoad, num_requests: int) -> None:
        """Sets the snapshot that `load` returns, and passes on the events of the prefix cache."""
        self._load, self.num_requests = load, num_requests
        if self.cache.events is not None:
            self.cache.events.flush()

    def load(self) -> WorkerLoad:
        """Load, pages, totals and step times after the last turn, with the age of the current step."""
        steps = self.steps
        return replace(
            self._load,
            step_age_s=steps.step_age_s(),
            pages=steps.pages(),
            activity=self.activity(),
            step_time=steps.step_time.fit(),
        )

    def activity(self) -> Activity:
        """Totals for the status line."""
        return Activity(self.steps.num_tokens, self._num_prompt_tokens, self._num_cached_tokens)

    def close(self) -> None:
        """Ends the loop after the current turn."""
        self.mailbox.close()

    def _wait_s(self, next_wakeup: float | None) -> float | None:
        if self._stepped:
            return 0.0
        waits = [] if next_wakeup is None else [max(0.0, next_wakeup - step_metrics.monotonic_s())]
        if not self._check.done:
            waits.append(SLICE_PAUSE_S if self._in_round else IDLE_CHECK_S)
        return min(waits, default=None)
