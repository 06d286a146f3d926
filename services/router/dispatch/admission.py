"""The door: who may wait, who may run, and what the others are told. Owned by `dispatcher`, on the event loop's thread.

Bounded in requests and in prompt tokens, first come first served, with a limit on how many run at once. Pure: time is
an argument, and waking a request that was called is the caller's business.

    admit --> waiting --(a running one leaves)--> running --> leave
      |          `-------------------------------------------^
      `-> Overloaded(retry_after_s)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from baton.domain.errors import Overloaded

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 120.0
RATE_WINDOW = 64


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Most requests that run, and most requests and prompt tokens that wait."""

    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """One admitted request's place; `number` counts admissions."""

    number: int
    num_tokens: int


class ServiceRate:
    """How fast requests leave, over the last `RATE_WINDOW` departures of the current busy period.

    The period's start counts as one departure: an estimate exists at once, and it falls while nothing leaves.
    """

    def __init__(self) -> None:
        self._departures: deque[float] = deque(maxlen=RATE_WINDOW)

    def begin(self, now: float) -> None:
        """A busy period starts; earlier ones are forgotten."""
        self._departures.clear()
        self._departures.append(now)

    def departed(self, now: float) -> None:
        """One request has left."""
        self._departures.append(now)

    def seconds_for(self, num_departures: int, now: float) -> float:
        """How long `num_departures` take at the measured rate, within what a client may sensibly be told."""
        elapsed = now - self._departures[0] if self._departures else 0.0
        estimate = num_departures * elapsed / max(1, len(self._departures))
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, estimate))


class Door:
    """Places of all admitted requests. Someone waits only while `max_running_requests` run."""

    def __init__(self, limits: DoorLimits) -> None:
        self._limits = limits
        self._waiting: OrderedDict[int, Place] = OrderedDict()
        self._running: dict[int, Place] = {}
        self._num_admitted = 0
        self._num_waiting_tokens = 0
        self._rate = ServiceRate()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_waiting_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    def admit(self, num_tokens: int, now: float) -> Place:
        """A place for a prompt of `num_tokens`; ask `may_run` whether it has to wait. Raises `Overloaded`."""
        if self._has_to_wait:
            self._refuse_overload(num_tokens, now)
        if not self._running:
            self._rate.begin(now)
        self._num_admitted += 1
        place = Place(self._num_admitted, num_tokens)
        self._enter(place)
        return place

    def may_run(self, place: Place) -> bool:
        """Whether the place is among the running."""
        return place.number in self._running

    def leave(self, place: Place, now: float) -> Place | None:
        """Gives a place back, waiting or running; returns the one that may run now because of it. Idempotent."""
        if self._waiting.pop(place.number, None) is not None:
            self._num_waiting_tokens -= place.num_tokens
            return None
        if self._running.pop(place.number, None) is None:
            return None
        self._rate.departed(now)
        return self._call_next()

    @property
    def _has_to_wait(self) -> bool:
        return len(self._running) >= self._limits.max_running_requests

    def _enter(self, place: Place) -> None:
        if self._has_to_wait:
            self._waiting[place.number] = place
            self._num_waiting_tokens += place.num_tokens
        else:
            self._running[place.number] = place

    def _call_next(self) -> Place | None:
        if not self._waiting:
            return None
        _, place = self._waiting.popitem(last=False)
        self._num_waiting_tokens -= place.num_tokens
        self._running[place.number] = place
        return place

    def _refuse_overload(self, num_tokens: int, now: float) -> None:
        num_ahead = self._num_in_the_way(num_tokens)
        if num_ahead:
            message = f"{self.num_waiting} requests with {self._num_waiting_tokens} prompt tokens are waiting already"
            raise Overloaded(message, retry_after_s=self._rate.seconds_for(num_ahead, now))

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
