"""Everybody inside: the door, and the journeys of all who passed it, waiting and running. Owned by `dispatcher`.

`admission.Door` decides; this wakes whom it calls, and knows when the house is empty.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from baton.domain.errors import Broken, DeadlineExceeded
from baton.domain.ids import RequestId
from baton.telemetry.metrics import QUEUED_REQUESTS, QUEUED_TOKENS
from services.router.dispatch.admission import Door, DoorLimits, Place
from services.router.dispatch.journey import Journey
from services.router.generation import Ticket


class Lobby:
    """Owned by one event loop."""

    def __init__(self, limits: DoorLimits) -> None:
        self._door = Door(limits)
        self._journeys: dict[RequestId, Journey] = {}
        self._by_place: dict[Place, Journey] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._journeys)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._journeys

    def refuse_if_full(self, deadline_s: float) -> None:
        """See `Door.refuse_if_full`."""
        self._door.refuse_if_full(self._now(), deadline_s)

    def resize(self, num_rows: int | None) -> None:
        """The workers have rows for so many; calls those who may run because of it."""
        for place in self._door.resize(num_rows, self._now()):
            self._by_place[place].called.set()
        self._show_queue()

    def answered(self, journey: Journey) -> None:
        """The journey has its first token."""
        self._door.answered(journey.place, self._now())

    def enter(
        self,
        num_tokens: int,
        begin: Callable[[Place], Journey],
        *,
        deadline_s: float = math.inf,
        always: bool = False,
    ) -> Journey:
        """The journey that `begin` makes of a place for `num_tokens`. Raises `Overloaded`, without calling it.

        `deadline_s`: the time it has, from now on. With `always` it is never refused.
        """
        place = self._door.admit(num_tokens, self._now(), deadline_s, always=always)
        journey = self._by_place[place] = begin(place)
        self._journeys[journey.job.id] = journey
        if self._door.may_run(place):
            journey.called.set()
        self._empty.clear()
        self._show_queue()
        return journey

    def start(self, ticket: Ticket) -> Journey:
        """The journey of a ticket that is to be run now. Raises `Broken` for one that was run or released before."""
        journey = self._journeys.get(ticket.job.id)
        if journey is None or journey is not ticket or journey.started:
            raise Broken(f"the ticket of {ticket.job.id} was run or released before")
        journey.started = True
        return journey

    def unstarted(self, ticket: Ticket) -> Journey | None:
        """The journey of a ticket that was neither run nor given back."""
        journey = self._journeys.get(ticket.job.id)
        return journey if journey is ticket and not journey.started else None

    async def wait_for_call(self, journey: Journey) -> None:
        """Returns when the journey may run. Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout_at(journey.deadline):
                await journey.called.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"request {journey.job.id} ran out of time in the queue") from None

    def leave(self, journey: Journey) -> None:
        """Gives the place back and calls the next."""
        del self._journeys[journey.job.id], self._by_place[journey.place]
        called = self._door.leave(journey.place, self._now())
        if called is not None:
            self._by_place[called].called.set()
        if not self._journeys:
            self._empty.set()
        self._show_queue()

    async def wait_empty(self) -> None:
        """Waits until nobody is inside."""
        await self._empty.wait()

    def _show_queue(self) -> None:
        QUEUED_REQUESTS.set(self._door.num_waiting)
        QUEUED_TOKENS.set(self._door.num_waiting_tokens)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
