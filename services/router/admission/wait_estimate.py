"""Estimates how long a request waits for a slot. Owned by `AdmissionQueue`; pure, time is an argument.

`fair_wait_s` is the work that will start before the request, over the rate at which the slots do work. Work is in
charged tokens (`slot`). For requests that are all alike, this is Little's law: the n-th departure comes after n * S / c
seconds, with c slots that are always taken and S the mean time that a request keeps its slot.

S covers the last `WINDOW` requests, so it outlives an idle hour. S is at least half the mean age of the running
requests, so it grows when none leaves. The first requests to leave are the short ones: until `NUM_WARM` have left, S is
at least what the pace of the tokens promises.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

WINDOW = 128

MAX_ITERATIONS = 16

NUM_WARM = 32

FIRST_SERVICE_TIME_S = 1.0
"""Least assumed time in a slot until the first request has left."""

SPREAD_FACTOR = 1.1
"""Retry-After times are this much further apart than departures, so that the queue is shorter when the next comes."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Expected charges of a tenant's waiting requests, and the service that it has and gets from running ones.

    `arrival_rate`: expected charges a second of the requests that it sends.
    """

    work: float
    weight: float
    service: float
    arrival_rate: float = 0.0

    def lifted(self, service: float) -> Backlog:
        """The backlog of a tenant that comes back from idle: its service is at least `service`."""
        return replace(self, service=max(self.service, service))


def work_ahead(own: Backlog, others: Iterable[Backlog], wait_s: float = 0.0, mean_charge: float = 0.0) -> float:
    """Work that starts before a newcomer behind `own`, if it waits for `wait_s`.

    The fair queue starts the tenant with the least service. By then the newcomer's tenant has the service of its
    backlog. Another tenant gets at most the work that raises it to the same service, and at most its own backlog with
    what it sends meanwhile: the mean, and one standard deviation of Poisson arrivals of `mean_charge` each.
    """
    reached = own.service + own.work / own.weight
    work = own.work
    for other in others:
        sent = other.arrival_rate * wait_s
        sent += math.sqrt(sent * mean_charge)
        work += min(other.work + sent, max(0.0, reached - other.service) * other.weight)
    return work


def fair_wait_s(own: Backlog, others: Sequence[Backlog], rate: float, next_slot: float) -> float:
    """Time until a newcomer behind `own` starts: its work ahead and `next_slot`, at `rate` charged tokens a second.

    Solved by iteration from below, since others send more while it waits.
    """
    wait_s = 0.0
    for _ in range(MAX_ITERATIONS):
        before, wait_s = wait_s, (work_ahead(own, others, wait_s, next_slot) + next_slot) / rate
        if wait_s - before <= 0.01 * wait_s:
            break
    return wait_s


class WaitEstimator:
    """Observes every request that takes a slot, gives its first token, and leaves."""

    def __init__(self) -> None:
        self._service_times: deque[float] = deque(maxlen=WINDOW)
        self._charges: deque[float] = deque(maxlen=WINDOW)
        self._first_tokens: deque[float] = deque(maxlen=WINDOW)
        self._num_running = 0
        self._started_sum = 0.0  # of the start times of the running ones
        self._num_started = 0
        self._expected_output_sum = 0.0
        self.token_s = 0.0  # pace of the running ones; set by the caller while `is_cold`

    def on_start(self, now: float, expected_output_tokens: float = 0.0) -> None:
        """A request took its slot."""
        self._num_running += 1
        self._started_sum += now
        self._num_started += 1
        self._expected_output_sum += expected_output_tokens

    def on_suspend(self, started_at: float) -> None:
        """A request gave its slot back, to go on later: that is no departure."""
        self._num_running -= 1
        self._started_sum = self._started_sum - started_at if self._num_running else 0.0

    def on_resume(self, started_at: float) -> None:
        """It has a slot again. `started_at`: as if it had never been without."""
        self._num_running += 1
        self._started_sum += started_at

    @property
    def is_cold(self) -> bool:
        """True until enough requests have left."""
        return len(self._service_times) < NUM_WARM

    def on_first_token(self, started_at: float, now: float) -> None:
        """A request that took its slot at `started_at` gave its first token."""
        self._first_tokens.append(now - started_at)

    def on_release(self, started_at: float, charge: float, now: float) -> None:
        """A request that took its slot at `started_at` left it. `charge`: the expected one, so a bias cancels out."""
        self._service_times.append(now - started_at)
        self._charges.append(charge)
        self.on_suspend(started_at)

    def service_time_s(self, now: float) -> float:
        """Mean time that a request keeps its slot; before the first has left, the mean age of the running ones."""
        age_s = now - self._started_sum / self._num_running if self._num_running else 0.0
        if not self._service_times:
            return max(age_s, FIRST_SERVICE_TIME_S, self._paced_s())
        mean_s = max(sum(self._service_times) / len(self._service_times), age_s / 2)
        return max(mean_s, self._paced_s()) if self.is_cold else mean_s

    def _paced_s(self) -> float:
        """Time in a slot by the pace of the tokens so far; 0 before there is one."""
        if not self.token_s:
            return 0.0
        return self.first_token_s() + self.token_s * self._expected_output_sum / self._num_started

    def mean_charge(self, expected: float) -> float:
        """Mean charge of a request; `expected` before the first has left. At least 1."""
        return max(1.0, sum(self._charges) / len(self._charges) if self._charges else expected)

    def rate(self, num_slots: int, expected_charge: float, now: float) -> float:
        """Charged tokens a second of `num_slots` slots that are always taken."""
        return max(1, num_slots) * self.mean_charge(expected_charge) / max(self.service_time_s(now), 1e-6)

    def first_token_s(self) -> float:
        """Mean time from a slot to the first token; 0 before the first one."""
        return sum(self._first_tokens) / len(self._first_tokens) if self._first_tokens else 0.0


class RetryAfterSpread:
    """Spreads the Retry-After times of refused requests over the departures to come. Between `min_s` and `max_s`."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._spread_until = 0.0

    def assign(self, wait_s: float, gap_s: float, now: float) -> float:
        """Seconds to wait: at least `wait_s`, and `gap_s` after the request refused before."""
        at = now + wait_s
        if self._spread_until > now:
            at = max(at, self._spread_until + SPREAD_FACTOR * gap_s)
        self._spread_until = min(at, now + self._max_s)
        return min(self._max_s, max(self._min_s, at - now))
