"""Decides which requests run, which wait and which are refused. Owned by `admission`; pure, time is an argument.

First come, first served. At most as many run as the workers have rows. The queue is bounded in requests, in prompt
tokens and in time: a request whose first token would come too late is refused at once. The caller wakes a request that
may run.

    admit --> waiting --(a running one leaves)--> running --> release
      |          `-------------------------------------------^
      `-> Overloaded(retry_after_s)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.domain.errors import Overloaded
from services.router.dispatch.wait_estimate import RetryAfterSpread, WaitEstimator

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of the running and the waiting requests.

    `max_ttft_s`: largest estimated time to the first token of a request that may wait.
    """

    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    max_ttft_s: float = math.inf


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one admitted request. `started_at` is None while it waits."""

    num_tokens: int
    started_at: float | None = None
    has_first_token: bool = False


class AdmissionQueue:
    """Slots of all admitted requests. A slot waits only while all running slots are taken."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._num_slots = limits.max_running_requests
        self._waiting: dict[Slot, None] = {}  # in order of admission
        self._running: set[Slot] = set()
        self._num_waiting_tokens = 0
        self._wait_estimator = WaitEstimator()
        self._retry_after_spread = RetryAfterSpread(MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_waiting_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    def ttft_s(self, now: float) -> float:
        """Estimated time to the first token of a request that arrives now and has to wait."""
        return self._wait_s(self.num_waiting + 1, now) + self._wait_estimator.first_token_s()

    def resize(self, num_rows: int | None, now: float) -> list[Slot]:
        """Sets the rows of all workers (None: unknown) and returns the slots that start because of it."""
        most = self._limits.max_running_requests
        self._num_slots = most if num_rows is None else max(1, min(num_rows, most))
        granted: list[Slot] = []
        while (slot := self._start_next(now)) is not None:
            granted.append(slot)
        return granted

    def refuse_if_full(self, now: float, deadline_s: float = math.inf, num_tokens: int = 0) -> None:
        """Raises `Overloaded` if a prompt of `num_tokens` cannot be admitted now. With 0, if no prompt can.

        `deadline_s`: the time that the request has.
        """
        if len(self._running) < self._num_slots:
            return
        ttft_s = self.ttft_s(now)
        excess_s = ttft_s - min(deadline_s, self._limits.max_ttft_s)
        num_ahead = self._num_blocking(num_tokens)
        if num_ahead or excess_s > 0:
            queue = f"{self.num_waiting} requests with {self._num_waiting_tokens} prompt tokens are waiting"
            why = f"{queue}, and a first token would probably take {ttft_s:.1f} s"
            wait_s = max(excess_s, self._wait_s(num_ahead, now))
            retry_after_s = self._retry_after_spread.assign(wait_s, gap_s=self._wait_s(1, now), now=now)
            raise Overloaded(why, retry_after_s=retry_after_s)

    def admit(self, num_tokens: int, now: float, deadline_s: float = math.inf, *, force: bool = False) -> Slot:
        """Returns a slot for a prompt of `num_tokens`, running or waiting. Raises `Overloaded`, unless `force`."""
        if not force:
            self.refuse_if_full(now, deadline_s, num_tokens)
        slot = Slot(num_tokens)
        if len(self._running) < self._num_slots:
            self._start(slot, now)
        else:
            self._waiting[slot] = None
            self._num_waiting_tokens += num_tokens
        return slot

    def is_running(self, slot: Slot) -> bool:
        """True unless the slot waits or was released."""
        return slot in self._running

    def on_first_token(self, slot: Slot, now: float) -> None:
        """Records the request's first token. Only the first call for a slot counts."""
        if slot in self._running and slot.started_at is not None and not slot.has_first_token:
            slot.has_first_token = True
            self._wait_estimator.on_first_token(slot.started_at, now)

    def release(self, slot: Slot, now: float) -> Slot | None:
        """Frees a slot, waiting or running, and returns the slot that starts because of it. Idempotent."""
        if slot in self._waiting:
            del self._waiting[slot]
            self._num_waiting_tokens -= slot.num_tokens
        elif slot in self._running and slot.started_at is not None:
            self._running.remove(slot)
            self._wait_estimator.on_release(slot.started_at, now)
            return self._start_next(now) if self._waiting else None
        return None

    def _start(self, slot: Slot, now: float) -> None:
        slot.started_at = now
        self._running.add(slot)
        self._wait_estimator.on_start(now)

    def _start_next(self, now: float) -> Slot | None:
        if not self._waiting or len(self._running) >= self._num_slots:
            return None
        slot = next(iter(self._waiting))
        del self._waiting[slot]
        self._num_waiting_tokens -= slot.num_tokens
        self._start(slot, now)
        return slot

    def _wait_s(self, num_departures: int, now: float) -> float:
        return self._wait_estimator.wait_s(num_departures, len(self._running), now)

    def _num_blocking(self, num_tokens: int) -> int:
        """Counts the waiting requests that must start before one of `num_tokens` may wait.

        Returns one more than all when it never may.
        """
        limits = self._limits
        num_ahead = max(0, self.num_waiting + 1 - limits.max_queued_requests)
        spare_tokens = limits.max_queued_tokens - self._num_waiting_tokens - num_tokens
        for num_started, slot in enumerate(self._waiting, start=1):
            if spare_tokens >= 0:
                return num_ahead
            spare_tokens += slot.num_tokens
            num_ahead = max(num_ahead, num_started)
        return num_ahead if spare_tokens >= 0 else self.num_waiting + 1
