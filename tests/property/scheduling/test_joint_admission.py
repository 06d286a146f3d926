"""Joint admission on a virtual clock: the real queue before one pair of workers whose announcements are stale or wrong.

`Reserve` is the truth: it gives pages of a small pool or says busy, and the request asks again. The queue sees only
what is announced every half second.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.arithmetic import ceil_div
from baton.services.router.admission.admission_queue import AdmissionLimits, AdmissionQueue
from baton.services.router.admission.credits import DecodeRoom, PrefillRoom, Shortage
from baton.services.router.admission.slot import Slot, SlotSpec
from baton.services.router.admission.start_rules import MAX_ASKING, MAX_OVERTAKES

HEARTBEAT_S, RETRY_S, PAGE = 0.5, 0.05, 16
ROWS, PAGES = 32, 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A request: its tenant, its prompt, when it comes, and how long it holds its pages."""

    tenant: str
    num_tokens: int
    at: float
    stay_s: float


@dataclass(slots=True)
class PairWorld:
    """One decode worker of `PAGES` pages behind a router. `announced`: what it tells of its free pages."""

    requests: Sequence[Sent]
    announced: Callable[[int, float], int | None] = lambda num_free, now: num_free
    now: float = 0.0
    num_free: int = PAGES
    num_rows: int = 0
    most_asking: int = 0
    started: dict[Sent, float] = field(default_factory=dict)
    placed: dict[Sent, float] = field(default_factory=dict)
    done: dict[Sent, float] = field(default_factory=dict)
    queue: AdmissionQueue = field(default_factory=lambda: AdmissionQueue(AdmissionLimits(ROWS)))
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _by_slot: dict[Slot, Sent] = field(default_factory=dict)
    _asking: list[Slot] = field(default_factory=list)

    def run(self, until: float) -> None:
        """Runs until all is done, or until `until`."""
        for request in self.requests:
            self._at(request.at, partial(self._arrive, request))
        self._at(0.0, self._announce)
        while self._events and len(self.done) < len(self.requests):
            self.now, _, what = heapq.heappop(self._events)
            if self.now > until:
                return
            what()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def _announce(self) -> None:
        num_pages = self.announced(self.num_free, self.now)
        rooms = []
        if num_pages is not None:
            rooms = [DecodeRoom(ROWS - self.num_rows, num_pages, PAGES, PAGE, (PrefillRoom(1e9),))]
        self._start(self.queue.resize(ROWS, self.now, rooms))
        self._at(self.now + HEARTBEAT_S, self._announce)

    def _arrive(self, request: Sent) -> None:
        slot = self.queue.admit(SlotSpec(request.tenant, request.num_tokens, 99), self.now)
        self._by_slot[slot] = request
        if slot.started_at is not None:
            self._start([slot])

    def _start(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.started[self._by_slot[slot]] = self.now
            self._asking.append(slot)
            self.most_asking = max(self.most_asking, len(self._asking))
            self._at(self.now, partial(self._ask, slot))

    def _ask(self, slot: Slot) -> None:
        request = self._by_slot[slot]
        num_pages = ceil_div(request.num_tokens + 1, PAGE)
        if num_pages > self.num_free or self.num_rows == ROWS:
            self._at(self.now + RETRY_S, partial(self._ask, slot))
            return
        self.num_free, self.num_rows = self.num_free - num_pages, self.num_rows + 1
        self._asking.remove(slot)
        self.placed[request] = self.now
        self._at(self.now + request.stay_s, partial(self._end, slot, num_pages))
        self._start(self.queue.on_room(slot, self.now))

    def _end(self, slot: Slot, num_pages: int) -> None:
        self.num_free, self.num_rows = self.num_free + num_pages, self.num_rows - 1
        self.done[self._by_slot[slot]] = self.now
        self._start(self.queue.on_tokens(slot, 1, 0, self.now))
        self._start(self.queue.release(slot, self.now))


def flood(tenant: str, num: int, every_s: float, stay_s: float = 1.0, num_tokens: int = 15) -> list[Sent]:
    return [Sent(tenant, num_tokens, n * every_s, stay_s) for n in range(num)]


BIG = Sent("big", 16 * 18 - 1, 5.0, 1.0)
"""18 of 20 pages."""


@pytest.mark.parametrize("tenant", ["small", "big"])
def test_a_large_prompt_is_passed_for_a_while_but_not_for_good(tenant):
    """Small ones take pages as soon as they are free: twenty at once for 1 s each, as many come, for ever."""
    big = Sent(tenant, BIG.num_tokens, 5.0, 1.0)
    smalls = flood("small", 4000, 0.05)
    world = PairWorld([*smalls, big])
    world.run(until=150.0)
    assert big in world.placed
    passed = [one for one, at in world.placed.items() if big.at < at < world.placed[big]]
    assert len(passed) >= MAX_OVERTAKES // 2, "it did not hold up those that fit"
    assert len(passed) <= 3 * MAX_OVERTAKES
    after = [one for one, at in world.placed.items() if at > world.placed[big]]
    assert len(after) > 500, "and they go on"


def test_requests_without_room_wait_in_the_fair_queue():
    larges = flood("large", 30, 0.01, stay_s=5.0, num_tokens=16 * 9)
    world = PairWorld([*larges, *flood("small", 100, 0.1)])
    world.run(until=12.0)
    assert world.most_asking <= 2 * MAX_ASKING + 1
    waits = [world.placed[one] - one.at for one in world.placed if one.tenant == "small"]
    assert len(waits) >= 60


@pytest.mark.parametrize("told", [0, PAGES, None], ids=["always full", "always free", "unknown"])
def test_wrong_announcements_cost_little(told):
    """80 requests of two pages and 1 s in 20 pages take 8 s."""
    requests = [Sent("ab"[n % 2], 31, n * 1e-6, 1.0) for n in range(80)]
    world = PairWorld(requests, announced=lambda num_free, now: told)
    world.run(until=60.0)
    assert len(world.done) == len(requests)
    assert max(world.done.values()) <= 9.5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 16 * PAGES - 1), st.floats(0.0, 20.0), st.floats(0.01, 3.0)),
        min_size=1,
        max_size=60,
        unique=True,
    ),
    st.lists(st.none() | st.integers(0, PAGES), max_size=12),
)
def test_every_request_is_served_whatever_is_announced(drawn, lies):
    """Announcements may be wrong or missing for six seconds; from then on they are true."""
    requests = [Sent(*one) for one in drawn]

    def announced(num_free: int, now: float) -> int | None:
        number = int(now / HEARTBEAT_S)
        return lies[number] if number < len(lies) else num_free

    world = PairWorld(requests, announced)
    world.run(until=2000.0)
    assert len(world.done) == len(requests)
    in_turn = max(one.at for one in requests) + sum(one.stay_s for one in requests)
    assert max(world.done.values()) <= in_turn + 2 * HEARTBEAT_S * len(requests) + 10.0, "no later than one by one"
    assert (world.num_free, world.num_rows, world.queue.num_waiting, world.queue.num_running) == (PAGES, 0, 0, 0)


def test_starts_without_credit_are_counted():
    world = PairWorld(flood("a", 30, 0.001), announced=lambda num_free, now: 0)
    world.run(until=30.0)
    assert world.queue.num_without_credit[Shortage.DECODE] == 29, "all but the one that came before an announcement"
