"""A virtual-time router for tests of fairness: the real admission queue before places that stream tokens."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from baton.domain.errors import Overloaded
from baton.services.router.admission.admission_queue import AdmissionLimits, AdmissionQueue
from baton.services.router.admission.slot import OUTPUT_CHARGE, Slot, SlotSpec
from baton.services.router.admission.tenants import TenantLimits, TenantTable

TOKEN_S = 0.02
PROMPT_TOKEN_S = 0.0005
CHUNK_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Offer:
    """Requests of one tenant: Poisson arrivals at `rate`, or always `backlog` in the queue."""

    tenant: str
    rate: float = 0.0
    backlog: int = 0
    prompt_tokens: tuple[int, int] = (50, 150)
    output_tokens: tuple[int, int] = (50, 150)
    weight: float = 1.0


@dataclass(slots=True)
class Outcomes:
    """Counts of one tenant; `served`: charged tokens at each second."""

    num_sent: int = 0
    num_refused: int = 0
    num_answered: int = 0
    ttfts: list[float] = field(default_factory=list)
    first_tokens_at: list[float] = field(default_factory=list)
    charges: list[float] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    served: list[float] = field(default_factory=list)


@dataclass(slots=True)
class TenantWorld:
    """Runs offers for some virtual seconds. `fifo`: all belong to one tenant of the queue."""

    offers: Sequence[Offer]
    num_places: int = 16
    max_ttft_s: float = 10.0
    fifo: bool = False
    seed: int = 0
    now: float = 0.0
    num_output_tokens: int = 0
    outcomes: dict[str, Outcomes] = field(default_factory=lambda: defaultdict(Outcomes))
    make_queue: Callable[[AdmissionLimits, TenantTable], AdmissionQueue] = AdmissionQueue
    _queue: AdmissionQueue = field(init=False)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _open: dict[Slot, tuple[Offer, float, int]] = field(default_factory=dict)
    _replacements: dict[Slot, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table = TenantTable(by_name={offer.tenant: TenantLimits(weight=offer.weight) for offer in self.offers})
        self._queue = self.make_queue(AdmissionLimits(self.num_places, self.max_ttft_s), table)

    @property
    def queue(self) -> AdmissionQueue:
        return self._queue

    def run(self, seconds: float) -> None:
        """Arrivals for `seconds`; what was admitted runs to its end."""
        self.schedule(seconds)
        self.advance(math.inf)

    def schedule(self, seconds: float) -> None:
        """Adds arrivals and measurements of `seconds`."""
        for number, offer in enumerate(self.offers):
            draw = Random(1000 * self.seed + number)  # every offer has its own, so others do not change it
            if offer.rate:
                when = 0.0
                while (when := when + draw.expovariate(offer.rate)) < seconds:
                    self._at(when, partial(self._arrive, offer, self._spec(offer, draw)))
            for _ in range(offer.backlog):
                self._at(0.0, partial(self._arrive, offer, self._spec(offer, draw), draw, seconds))
        for second in range(1, int(seconds) + 1):
            self._at(float(second), self._measure)

    def advance(self, until: float) -> None:
        """Runs what is due."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def arrive_at(self, when: float, offer: Offer, seed: int) -> None:
        """Adds one request."""
        self._at(when, partial(self._arrive, offer, self._spec(offer, Random(seed))))

    def measure_at(self, when: float) -> None:
        """Adds a measurement."""
        self._at(when, self._measure)

    def _spec(self, offer: Offer, draw: Random) -> SlotSpec:
        return SlotSpec(offer.tenant, draw.randint(*offer.prompt_tokens), draw.randint(*offer.output_tokens))

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def _arrive(self, offer: Offer, spec: SlotSpec, again: Random | None = None, until: float = math.inf) -> None:
        outcomes = self.outcomes[offer.tenant]
        outcomes.num_sent += 1
        try:
            slot = self._queue.admit(replace(spec, tenant="") if self.fifo else spec, self.now)
        except Overloaded:
            outcomes.num_refused += 1
            outcomes.answers.append(False)
            return
        outcomes.answers.append(True)
        self._open[slot] = offer, self.now, spec.max_tokens
        if again is not None and self.now < until:
            self._replacements[slot] = partial(self._arrive, offer, self._spec(offer, again), again, until)
        if self._queue.is_running(slot):
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        if (replacement := self._replacements.pop(slot, None)) is not None:
            self._at(self.now, replacement)  # keeps the backlog
        self._at(self.now + PROMPT_TOKEN_S * slot.spec.num_tokens, partial(self._stream, slot, 1))

    def _stream(self, slot: Slot, num_tokens: int) -> None:
        offer, arrived_at, num_left = self._open[slot]
        outcomes = self.outcomes[offer.tenant]
        if not slot.has_first_token:
            outcomes.ttfts.append(self.now - arrived_at)
            outcomes.first_tokens_at.append(self.now)
            outcomes.charges.append(slot.spec.num_tokens + OUTPUT_CHARGE * slot.spec.max_tokens)
        self._queue.on_tokens(slot, num_tokens, 0, self.now)
        self.num_output_tokens += num_tokens
        num_left -= num_tokens
        self._open[slot] = offer, arrived_at, num_left
        if num_left:
            step = min(CHUNK_TOKENS, num_left)
            self._at(self.now + TOKEN_S * step, partial(self._stream, slot, step))
            return
        outcomes.num_answered += 1
        del self._open[slot]
        for started in self._queue.release(slot, self.now):
            self._start(started)

    def _measure(self) -> None:
        charges = self._queue.charges()
        for offer in self.offers:
            self.outcomes[offer.tenant].served.append(charges.get(offer.tenant, 0.0))


def capacity(num_places: int, prompt_tokens: float, output_tokens: float) -> float:
    """Requests a second that the places can serve."""
    return num_places / (prompt_tokens * PROMPT_TOKEN_S + output_tokens * TOKEN_S)


def charge_rate(num_places: int, prompt_tokens: float, output_tokens: float) -> float:
    """Charged tokens a second."""
    charge = prompt_tokens + OUTPUT_CHARGE * output_tokens
    return charge * capacity(num_places, prompt_tokens, output_tokens)


def jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
