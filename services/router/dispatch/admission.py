"""The door: who may wait, who may run, and what the others are told. Owned by `lobby`, on the event loop's thread.

First come first served. As many run as the workers have rows for, up to a limit; the queue is bounded in requests, in
prompt tokens and in time: who would get its first token too late is better refused at once. Pure: time is an argument,
and waking a request that was called is the caller's business.

    admit --> waiting --(a running one leaves)--> running --> leave
      |          `-------------------------------------------^
      `-> Overloaded(retry_after_s)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from baton.domain.errors import Overloaded
from services.router.dispatch.forecast import Appointments, Forecast

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Most requests that run, and most requests and prompt tokens that wait.

    `max_ttft_s`: who would probably wait longer for its first token is refused.
    """

    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    max_ttft_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Place:
    """One admitted request's place; `number` counts admissions."""

    number: int
    num_tokens: int


@dataclass(slots=True)
class _Running:
    started_at: float
    answered: bool = False


class Door:
    """Places of all admitted requests. Someone waits only while as many run as may."""

    def __init__(self, limits: DoorLimits) -> None:
        self._limits = limits
        self._num_places = limits.max_running_requests
        self._waiting: OrderedDict[int, Place] = OrderedDict()
        self._running: dict[int, _Running] = {}
        self._num_admitted = 0
        self._num_waiting_tokens = 0
        self._forecast = Forecast()
        self._appointments = Appointments(MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S)

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
        return self._wait_s(self.num_waiting + 1, now) + self._forecast.first_token_s()

    def resize(self, num_rows: int | None, now: float) -> list[Place]:
        """The workers have rows for so many (None: unknown); returns those that may run now because of it."""
        most = self._limits.max_running_requests
        self._num_places = most if num_rows is None else max(1, min(num_rows, most))
        called: list[Place] = []
        while (place := self._call_next(now)) is not None:
            called.append(place)
        return called

    def refuse_if_full(self, now: float, deadline_s: float = math.inf) -> None:
        """Raises `Overloaded` if nobody would be admitted now, however short the prompt: costs nothing to ask."""
        self._refuse_overload(0, now, deadline_s)

    def admit(self, num_tokens: int, now: float, deadline_s: float = math.inf, *, always: bool = False) -> Place:
        """A place for a prompt of `num_tokens`; ask `may_run` whether it has to wait. Raises `Overloaded`.

        `deadline_s`: the time the request has. With `always` (it is under way already) it is never refused.
        """
        if not always:
            self._refuse_overload(num_tokens, now, deadline_s)
        self._num_admitted += 1
        place = Place(self._num_admitted, num_tokens)
        if self._has_to_wait:
            self._waiting[place.number] = place
            self._num_waiting_tokens += num_tokens
        else:
            self._start(place, now)
        return place

    def may_run(self, place: Place) -> bool:
        """Whether the place is among the running."""
        return place.number in self._running

    def answered(self, place: Place, now: float) -> None:
        """The request has given its first token; only the first time counts."""
        running = self._running.get(place.number)
        if running is not None and not running.answered:
            running.answered = True
            self._forecast.answered(running.started_at, now)

    def leave(self, place: Place, now: float) -> Place | None:
        """Gives a place back, waiting or running; returns the one that may run now because of it. Idempotent."""
        if self._waiting.pop(place.number, None) is not None:
            self._num_waiting_tokens -= place.num_tokens
            return None
        running = self._running.pop(place.number, None)
        if running is None:
            return None
        self._forecast.left(running.started_at, now)
        return self._call_next(now)

    @property
    def _has_to_wait(self) -> bool:
        return len(self._running) >= self._num_places

    def _start(self, place: Place, now: float) -> None:
        self._running[place.number] = _Running(now)
        self._forecast.started(now)

    def _call_next(self, now: float) -> Place | None:
        if not self._waiting or self._has_to_wait:
            return None
        _, place = self._waiting.popitem(last=False)
        self._num_waiting_tokens -= place.num_tokens
        self._start(place, now)
        return place

    def _refuse_overload(self, num_tokens: int, now: float, deadline_s: float) -> None:
        if not self._has_to_wait:
            return
        ttft_s = self.ttft_s(now)
        excess_s = ttft_s - min(deadline_s, self._limits.max_ttft_s)
        num_ahead = self._num_in_the_way(num_tokens)
        if num_ahead or excess_s > 0:
            queue = f"{self.num_waiting} requests with {self._num_waiting_tokens} prompt tokens are waiting"
            why = f"{queue}, and a first token would probably take {ttft_s:.1f} s"
            wait_s = max(excess_s, self._wait_s(num_ahead, now))
            retry_after_s = self._appointments.make(wait_s, gap_s=self._wait_s(1, now), now=now)
            raise Overloaded(why, retry_after_s=retry_after_s)

    def _wait_s(self, num_departures: int, now: float) -> float:
        return self._forecast.wait_s(num_departures, len(self._running), now)

    def _num_in_the_way(self, num_tokens: int) -> int:
        """How many of the waiting must be called before one of `num_tokens` may wait; all and one if it never may."""
        limits = self._limits
        num_ahead = max(0, self.num_waiting + 1 - limits.max_queued_requests)
        spare_tokens = limits.max_queued_tokens - self._num_waiting_tokens - num_tokens
        for num_called, place in enumerate(self._waiting.values(), start=1):
            if spare_tokens >= 0:
                return num_ahead
            spare_tokens += place.num_tokens
            num_ahead = max(num_ahead, num_called)
        return num_ahead if spare_tokens >= 0 else self.num_waiting + 1
