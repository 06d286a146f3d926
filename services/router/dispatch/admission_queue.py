"""The door: who may wait, who may run, and what the others are told. Owned by `admission`, on the event loop's thread.

First come first served. As many run as the workers have rows for, up to a limit; the queue is bounded in requests, in
prompt tokens and in time: who would get its first token too late is better refused at once. Pure: time is an argument,
and waking a request that was granted is the caller's business.

    admit --> waiting --(a running one leaves)--> running --> leave
      |          `-------------------------------------------^
      `-> Overloaded(retry_after_s)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from baton.domain.errors import Overloaded
from services.router.dispatch.wait_estimate import RetryAfterSpread, WaitEstimator

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Most requests that run, and most requests and prompt tokens that wait.

    `max_ttft_s`: who would probably wait longer for its first token is refused.
    """

    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    max_ttft_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Slot:
    """One admitted request's slot; `number` counts admissions."""

    number: int
    num_tokens: int


@dataclass(slots=True)
class _Running:
    started_at: float
    has_first_token: bool = False


class AdmissionQueue:
    """Places of all admitted requests. Someone waits only while as many run as may."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._num_slots = limits.max_running_requests
        self._waiting: OrderedDict[int, Slot] = OrderedDict()
        self._running: dict[int, _Running] = {}
        self._num_admitted = 0
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
        """Seconds until a request that comes now, and has to wait, would probably give its first token."""
        return self._wait_s(self.num_waiting + 1, now) + self._wait_estimator.first_token_s()

    def resize(self, num_rows: int | None, now: float) -> list[Slot]:
        """The workers have rows for so many (None: unknown); returns those that may run now because of it."""
        most = self._limits.max_running_requests
        self._num_slots = most if num_rows is None else max(1, min(num_rows, most))
        granted: list[Slot] = []
        while (slot := self._start_next(now)) is not None:
            granted.append(slot)
        return granted

    def refuse_if_full(self, now: float, deadline_s: float = math.inf) -> None:
        """Raises `Overloaded` if nobody would be admitted now, however short the prompt: costs nothing to ask."""
        self._check_overload(0, now, deadline_s)

    def admit(self, num_tokens: int, now: float, deadline_s: float = math.inf, *, force: bool = False) -> Slot:
        """A slot for a prompt of `num_tokens`; ask `is_running` whether it has to wait. Raises `Overloaded`.

        `deadline_s`: the time the request has. With `force` (it is under way already) it is never refused.
        """
        if not force:
            self._check_overload(num_tokens, now, deadline_s)
        self._num_admitted += 1
        slot = Slot(self._num_admitted, num_tokens)
        if self._has_to_wait:
            self._waiting[slot.number] = slot
            self._num_waiting_tokens += num_tokens
        else:
            self._start(slot, now)
        return slot

    def is_running(self, slot: Slot) -> bool:
        """Whether the slot is among the running."""
        return slot.number in self._running

    def on_first_token(self, slot: Slot, now: float) -> None:
        """The request has given its first token; only the first time counts."""
        running = self._running.get(slot.number)
        if running is not None and not running.has_first_token:
            running.has_first_token = True
            self._wait_estimator.on_first_token(running.started_at, now)

    def release(self, slot: Slot, now: float) -> Slot | None:
        """Gives a slot back, waiting or running; returns the one that may run now because of it. Idempotent."""
        if self._waiting.pop(slot.number, None) is not None:
            self._num_waiting_tokens -= slot.num_tokens
            return None
        running = self._running.pop(slot.number, None)
        if running is None:
            return None
        self._wait_estimator.on_release(running.started_at, now)
        return self._start_next(now)

    @property
    def _has_to_wait(self) -> bool:
        return len(self._running) >= self._num_slots

    def _start(self, slot: Slot, now: float) -> None:
        self._running[slot.number] = _Running(now)
        self._wait_estimator.on_start(now)

    def _start_next(self, now: float) -> Slot | None:
        if not self._waiting or self._has_to_wait:
            return None
        _, slot = self._waiting.popitem(last=False)
        self._num_waiting_tokens -= slot.num_tokens
        self._start(slot, now)
        return slot

    def _check_overload(self, num_tokens: int, now: float, deadline_s: float) -> None:
        if not self._has_to_wait:
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

    def _wait_s(self, num_departures: int, now: float) -> float:
        return self._wait_estimator.wait_s(num_departures, len(self._running), now)

    def _num_blocking(self, num_tokens: int) -> int:
        """How many of the waiting must be granted before one of `num_tokens` may wait; all and one if it never may."""
        limits = self._limits
        num_ahead = max(0, self.num_waiting + 1 - limits.max_queued_requests)
        spare_tokens = limits.max_queued_tokens - self._num_waiting_tokens - num_tokens
        for num_started, slot in enumerate(self._waiting.values(), start=1):
            if spare_tokens >= 0:
                return num_ahead
            spare_tokens += slot.num_tokens
            num_ahead = max(num_ahead, num_started)
        return num_ahead if spare_tokens >= 0 else self.num_waiting + 1
